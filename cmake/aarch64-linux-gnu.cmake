# For `cmake --toolchain`: 64-bit ARM Linux with Debian's cross compiler; tests run under qemu-user
# (scripts/aarch64). QEMU_CPU in the environment chooses the processor, by default one that has everything.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static)
