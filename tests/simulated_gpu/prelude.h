#pragma once

// Before each of castor's GPU sources, so that they are compiled as they are: what torch calls a
// CUDA device is here the device that tests add to torch (PrivateUse1). torch's headers come first.

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#define kCUDA kPrivateUse1
#define is_cuda is_privateuseone
