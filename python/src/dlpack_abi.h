// The C structures of DLPack 1.x, as far as they are exchanged here. Layout and numbers are the
// protocol's; the declarations are our own.
#pragma once

#include <cstdint>

namespace moesaic::python {

struct DlDevice {
  std::int32_t type = 1, index = 0;
};
inline constexpr std::int32_t kDlCpu = 1, kDlCuda = 2, kDlCudaHost = 3, kDlCudaManaged = 13;

struct DlType {
  std::uint8_t code = 0, bits = 0;
  std::uint16_t lanes = 1;
};

struct DlTensor {
  void* data = nullptr;
  DlDevice device;
  std::int32_t rank = 0;
  DlType dtype;
  std::int64_t* shape = nullptr;
  std::int64_t* strides = nullptr;  // in elements; null: contiguous
  std::uint64_t byte_offset = 0;
};

// What a capsule "dltensor" holds.
struct DlManaged {
  DlTensor tensor;
  void* context = nullptr;
  void (*deleter)(DlManaged*) = nullptr;
};

struct DlVersion {
  std::uint32_t major = 1, minor = 1;
};
inline constexpr std::uint64_t kDlReadOnly = 1;

// What a capsule "dltensor_versioned" holds.
struct DlManagedVersioned {
  DlVersion version;
  void* context = nullptr;
  void (*deleter)(DlManagedVersioned*) = nullptr;
  std::uint64_t flags = 0;
  DlTensor tensor;
};

// The table in the capsule type(x).__dlpack_c_exchange_api__ ("dlpack_exchange_api"). Functions
// return 0, or -1 with a Python error set (the allocator: by its last argument).
struct DlExchange {
  DlVersion version;
  DlExchange* previous = nullptr;
  int (*allocate)(DlTensor* like, DlManagedVersioned** out, void* context,
                  void (*set_error)(void* context, const char* kind, const char* text)) = nullptr;
  int (*managed_from_object)(void* object, DlManagedVersioned** out) = nullptr;
  int (*managed_to_object)(DlManagedVersioned* tensor, void** out) = nullptr;
  int (*tensor_from_object)(void* object, DlTensor* out) = nullptr;  // may be null
  int (*current_stream)(std::int32_t device_type, std::int32_t index, void** out) = nullptr;
};

}  // namespace moesaic::python
