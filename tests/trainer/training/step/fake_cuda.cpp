// Lets a CPU build of torch have tensors without data on "cuda:0", with gradients. A build for CUDA
// has this by itself where there is no GPU. Source: torch 2.13, c10/core/impl/
// DeviceGuardImplInterface.cpp, ensureCUDADeviceGuardSet.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
} // namespace at

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuardImpl<DeviceType::CUDA>)
} // namespace c10::impl
