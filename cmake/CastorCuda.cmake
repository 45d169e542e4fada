# Whether the GPU parts are built. CASTOR_HAVE_CUDA_RUNTIME: there are headers and a runtime library,
# for what is plain C++. CASTOR_HAVE_NVCC: there is a compiler for kernels, and the language CUDA is on.
#
# CASTOR_CUDA=AUTO takes what is there and says what it found; ON fails where something is missing.
set(CASTOR_HAVE_CUDA_RUNTIME OFF)
set(CASTOR_HAVE_NVCC OFF)
if(NOT CASTOR_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "CASTOR_CUDA is \"${CASTOR_CUDA}\"; use AUTO, ON or OFF")
endif()
if(CASTOR_CUDA STREQUAL "OFF")
  message(STATUS "castor CUDA: left out, because CASTOR_CUDA is OFF")
  return()
endif()

# Up to here CUDA 12.8 is the oldest that knows every architecture below.
set(castor_cuda_oldest 12.8)
find_package(CUDAToolkit ${castor_cuda_oldest} QUIET)
if(CUDAToolkit_FOUND)
  set(CASTOR_HAVE_CUDA_RUNTIME ON)
  # Kernels cannot run under the sanitizers of the host.
  if(NOT CASTOR_SANITIZE)
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      set(CASTOR_HAVE_NVCC ON)
    endif()
  endif()
endif()

if(CASTOR_CUDA STREQUAL "ON" AND NOT CASTOR_SANITIZE AND NOT CASTOR_HAVE_NVCC)
  message(FATAL_ERROR "CASTOR_CUDA is ON and there is no CUDA toolkit ${castor_cuda_oldest} or newer with "
                      "nvcc: install one and put its bin on PATH or name nvcc in CUDACXX, or set "
                      "CASTOR_CUDA=OFF")
endif()
if(NOT CASTOR_HAVE_NVCC)
  if(NOT CASTOR_SANITIZE)
    message(STATUS "castor CUDA: no kernels, because there is no CUDA toolkit ${castor_cuda_oldest} or newer "
                   "with nvcc on PATH or in CUDACXX")
  endif()
  return()
endif()

# A100, RTX 30, RTX 40 and L40, H100 and H200, B200 and B300, RTX 50 (scripts/wheel_check.py asks for
# each). PTX of the last one, for what comes.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES "80-real;86-real;89-real;90-real;100-real;120"
      CACHE STRING "GPU architectures to compile kernels for")
endif()
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
# One CUDA runtime in the process, torch's: its streams are passed to castor.
set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
if(NOT CMAKE_CUDA_COMPILER_LAUNCHER AND CASTOR_CCACHE)
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${CASTOR_CCACHE}")
endif()
enable_language(CUDA)
# CMake before 3.26 does not know that nvcc has had C++20 since 12.0.
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
message(STATUS "castor CUDA: nvcc ${CMAKE_CUDA_COMPILER_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}")
