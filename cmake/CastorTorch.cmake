# castor::torch: the headers and libraries of the torch that the Python interpreter imports.
#
# Not find_package(Torch): with PyPI's CUDA wheel it probes for a CUDA compiler and fails without one.
# The link is by path; nothing of those paths reaches the installed module, because
# castor/__init__.py imports torch first and its libraries are then already loaded.

find_package(Python 3.10 QUIET COMPONENTS Interpreter Development.Module)
if(NOT Python_FOUND)
  message(FATAL_ERROR "castor._C needs Python 3.10 or newer with its headers (interpreter found: "
                      "\"${Python_EXECUTABLE}\", headers found: \"${Python_INCLUDE_DIRS}\"): apt-get "
                      "install python3-dev")
endif()

execute_process(
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/describe_torch.py"
  OUTPUT_VARIABLE castor_torch_description
  OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE castor_torch_result)
if(NOT castor_torch_result EQUAL 0)
  message(FATAL_ERROR "${Python_EXECUTABLE} cannot import torch. Install torch there, and build with "
                      "pip install --no-build-isolation, so that castor compiles against the torch "
                      "it will run with.")
endif()
list(GET castor_torch_description 0 CASTOR_TORCH_VERSION)
list(GET castor_torch_description 1 CASTOR_TORCH_CUDA)
list(GET castor_torch_description 2 castor_torch_cxx11_abi)
list(GET castor_torch_description 3 castor_torch_lib_dir)
list(SUBLIST castor_torch_description 4 -1 castor_torch_include_dirs)
string(REGEX MATCH "^[0-9]+[.][0-9]+" castor_torch_minor "${CASTOR_TORCH_VERSION}")
# Where extensions are installed: a wheel holds one folder for each torch; castor/_loader.py picks.
set(CASTOR_EXTENSION_FOLDER "castor/_extensions/torch${castor_torch_minor}")
message(STATUS "torch ${CASTOR_TORCH_VERSION} of ${Python_EXECUTABLE}")
# The range stands in pyproject.toml alone. csrc/torch/torch_versions.h tells the releases in it apart.
file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../pyproject.toml" castor_torch_range
     REGEX "^requires = .*torch>=[0-9.]+,<[0-9.]+" LIMIT_COUNT 1)
if(NOT castor_torch_range MATCHES "(torch>=([0-9.]+),<([0-9.]+))")
  message(FATAL_ERROR "pyproject.toml does not say which torch releases castor can be built for")
endif()
set(castor_torch_range "${CMAKE_MATCH_1}")
if(CASTOR_TORCH_VERSION VERSION_LESS CMAKE_MATCH_2 OR NOT CASTOR_TORCH_VERSION VERSION_LESS CMAKE_MATCH_3)
  message(FATAL_ERROR "castor is built for ${castor_torch_range}, and ${Python_EXECUTABLE} has torch "
                      "${CASTOR_TORCH_VERSION}: pip install \"${castor_torch_range}\"")
endif()

add_library(castor_torch_deps INTERFACE)
add_library(castor::torch ALIAS castor_torch_deps)
# These directories bring pybind11 too, the one torch was built with. It is the only pybind11 in the
# build: a second one in the same module would break the one-definition rule.
target_include_directories(castor_torch_deps SYSTEM INTERFACE ${castor_torch_include_dirs})
target_compile_definitions(castor_torch_deps
                           INTERFACE _GLIBCXX_USE_CXX11_ABI=${castor_torch_cxx11_abi})
foreach(library IN ITEMS torch_python torch torch_cpu c10)
  find_library(castor_lib_${library} "${library}" PATHS "${castor_torch_lib_dir}"
               NO_DEFAULT_PATH NO_CACHE REQUIRED)
  target_link_libraries(castor_torch_deps INTERFACE "${castor_lib_${library}}")
endforeach()
target_link_libraries(castor_torch_deps INTERFACE Python::Module)

# castor_precompile_torch(TARGET): in a sanitizer's build torch's headers are read once for all files of the target.
# They are more than half of its compile time there. An optimised build gains nothing: reading the precompiled headers
# of all files takes as long as compiling those that one file needs.
function(castor_precompile_torch target)
  if(NOT CASTOR_SANITIZE)
    return()
  endif()
  if(target STREQUAL "castor_torch")
    target_precompile_headers(
      ${target} PRIVATE <torch/csrc/utils/pybind.h> <pybind11/stl.h> <ATen/ATen.h> <torch/library.h>
                        <torch/csrc/autograd/function.h> <torch/csrc/autograd/variable.h>)
  else()
    # The compiler takes them only where the same is defined as where they were made.
    target_compile_definitions(${target}
                               PRIVATE $<TARGET_PROPERTY:castor_io,INTERFACE_COMPILE_DEFINITIONS>)
    target_precompile_headers(${target} REUSE_FROM castor_torch)
  endif()
endfunction()

# castor_link_torch_copies(TARGET): gives a program copy_on_cpu, the CPU device's copy, and what that needs of
# csrc/torch and of torch, without linking Python.
function(castor_link_torch_copies target)
  set(sources "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../csrc/torch")
  target_sources(${target} PRIVATE "${sources}/chunk_storages.cc" "${sources}/param_storages.cc"
                                   "${sources}/storage_writes.cc" "${sources}/../store/memory_writes.cc")
  target_include_directories(
    ${target} SYSTEM PRIVATE $<TARGET_PROPERTY:castor::torch,INTERFACE_INCLUDE_DIRECTORIES>)
  target_compile_definitions(
    ${target} PRIVATE $<TARGET_PROPERTY:castor::torch,INTERFACE_COMPILE_DEFINITIONS>)
  target_link_libraries(${target} PRIVATE castor_core "${castor_lib_torch_cpu}" "${castor_lib_c10}")
endfunction()

# castor::torch_cuda: the same with torch's CUDA allocator and streams. The toolkit must be of torch's
# major version: one libcudart serves both.
if(CASTOR_HAVE_NVCC)
  if(CASTOR_TORCH_CUDA MATCHES "^${CUDAToolkit_VERSION_MAJOR}[.]")
    find_library(castor_lib_c10_cuda c10_cuda PATHS "${castor_torch_lib_dir}" NO_DEFAULT_PATH NO_CACHE REQUIRED)
    add_library(castor_torch_cuda_deps INTERFACE)
    add_library(castor::torch_cuda ALIAS castor_torch_cuda_deps)
    target_include_directories(castor_torch_cuda_deps SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
    target_link_libraries(castor_torch_cuda_deps INTERFACE castor_torch_deps "${castor_lib_c10_cuda}")
  else()
    set(castor_cuda_mismatch "torch ${CASTOR_TORCH_VERSION} is built for CUDA \"${CASTOR_TORCH_CUDA}\" and the "
                             "toolkit is ${CUDAToolkit_VERSION}: they must be of one major version")
    if(CASTOR_CUDA STREQUAL "ON" AND CASTOR_BUILD_PYTHON)
      message(FATAL_ERROR "CASTOR_CUDA is ON, and " ${castor_cuda_mismatch})
    endif()
    message(STATUS "castor CUDA: no module castor._cuda, because " ${castor_cuda_mismatch})
  endif()
endif()
