# Install rules: library, public headers, tool, and the config package `Moesaic` with its one target
# Moesaic::moesaic.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(moesaic_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Moesaic)

install(TARGETS moesaic EXPORT MoesaicTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/moesaic DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING
        PATTERN "*.h")
install(EXPORT MoesaicTargets NAMESPACE Moesaic:: DESTINATION ${moesaic_package_dir})

get_target_property(moesaic_type moesaic TYPE)
set(MOESAIC_IS_SHARED OFF)
if(moesaic_type STREQUAL "SHARED_LIBRARY")
  set(MOESAIC_IS_SHARED ON)
endif()
set(MOESAIC_WITH_MPI OFF)
if(MPI_CXX_FOUND)
  set(MOESAIC_WITH_MPI ON)
endif()
configure_package_config_file(
  ${CMAKE_CURRENT_LIST_DIR}/MoesaicConfig.cmake.in ${PROJECT_BINARY_DIR}/MoesaicConfig.cmake
  INSTALL_DESTINATION ${moesaic_package_dir}
  NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/MoesaicConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/MoesaicConfig.cmake ${PROJECT_BINARY_DIR}/MoesaicConfigVersion.cmake
        DESTINATION ${moesaic_package_dir})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

if(TARGET moesaic_tool)
  if(MOESAIC_IS_SHARED)
    # The tool finds the library beside it, wherever the whole is moved to.
    file(RELATIVE_PATH moesaic_from_bin ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
    set_property(TARGET moesaic_tool APPEND PROPERTY INSTALL_RPATH "$ORIGIN/${moesaic_from_bin}")
  endif()
  install(TARGETS moesaic_tool RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
