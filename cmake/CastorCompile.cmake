# How every translation unit of castor is compiled. Directory-wide, so that no target can miss it.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(CASTOR_CCACHE ccache)
  if(CASTOR_CCACHE)
    set(CMAKE_CXX_COMPILER_LAUNCHER "${CASTOR_CCACHE}")
  endif()
endif()

include_directories("${PROJECT_SOURCE_DIR}/csrc")

# In designated initialisers the members left out are value-initialised: nothing to warn about.
set(castor_warnings -Wall -Wextra -Wconversion -Wnon-virtual-dtor -Woverloaded-virtual
                    -Wno-missing-field-initializers)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  list(APPEND castor_warnings -Wno-restrict) # false alarms on "literal" + std::string, GCC bug 105651
endif()
# nvcc hands these on to the host's compiler.
list(JOIN castor_warnings "," castor_nvcc_warnings)
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${castor_warnings}>"
                    "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${castor_nvcc_warnings}>")
if(CASTOR_WERROR)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-Werror>"
                      "$<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings>")
endif()

# Never -march=native: a wheel runs on machines other than the one that built it. Never a fused
# multiply-add that the source does not spell out: the bits of an update must not depend on the
# instruction set.
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)
add_compile_options($<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-g1>)

if(CASTOR_SANITIZE STREQUAL "address")
  set(castor_sanitizer_flags -fsanitize=address,undefined -fno-sanitize-recover=all)
elseif(CASTOR_SANITIZE STREQUAL "thread")
  set(castor_sanitizer_flags -fsanitize=thread)
elseif(CASTOR_SANITIZE)
  message(FATAL_ERROR "CASTOR_SANITIZE is \"${CASTOR_SANITIZE}\"; use \"address\" or \"thread\"")
endif()
if(CASTOR_SANITIZE)
  # -UNDEBUG: in these builds assert and the library's own checks are on, whatever the build type. -g1: lines for the
  # reports, and no more. All of -g is a quarter of the time that a file of tests takes to compile.
  add_compile_options(${castor_sanitizer_flags} -g1 -fno-omit-frame-pointer -O1 -UNDEBUG)
  add_compile_definitions(_GLIBCXX_ASSERTIONS)
  add_link_options(${castor_sanitizer_flags})
endif()
