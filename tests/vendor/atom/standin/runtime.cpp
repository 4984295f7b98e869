// A stand-in for Rebellions' runtime library, librbln.so.
//
// Ours, and small. It holds bytes in host memory, so that the unmodified torch-rbln wheel can be loaded and its
// copies observed on a machine without an NPU. It shows which calls torch-rbln makes, with which offsets and
// sizes, and what becomes of their failures. It shows nothing about the hardware or the vendor's library.
//
// Signatures are those that the wheel's native libraries import. What they import and a test of ours never calls
// lies in missing.cpp, which the build makes from the wheel's own symbol tables: there, a call ends the process.

#include <cstdint>
#include <cstdlib>
#include <string>
#include <tuple>
#include <vector>

#include "memory.h"

using standin::Code;
using standin::kOk;

using Ranges = std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>;  // source, destination, bytes

namespace rbln {

Code rbln_malloc_lazy(uint32_t device, uint64_t nbytes, uint64_t& address) {
  return standin::Allocate(device, nbytes, &address);
}
Code rbln_malloc_eager(uint32_t device, uint64_t nbytes, uint64_t& address) {
  return standin::Allocate(device, nbytes, &address);
}
Code rbln_free(uint64_t address) { return standin::Free(address); }
Code rbln_mark_zeros(uint64_t address) { return standin::Zero(address); }

Code rbln_memcpy_h2v(uint64_t source, uint64_t destination, uint64_t nbytes) {
  return standin::Write("h2v", destination, reinterpret_cast<const void*>(source), nbytes);
}
Code rbln_memcpy_v2h(uint64_t source, uint64_t destination, uint64_t nbytes) {
  return standin::Read("v2h", source, reinterpret_cast<void*>(destination), nbytes);
}
Code rbln_memcpy_v2v(uint64_t source, uint64_t destination, uint64_t nbytes) {
  return standin::Copy(source, destination, nbytes);
}

// Copies end before the call does: to the caller an event that has happened already.
Code rbln_memcpy_h2v_async(uint64_t source, uint64_t destination, uint64_t nbytes, uint64_t* event) {
  *event = 0;
  return standin::Write("h2v_async", destination, reinterpret_cast<const void*>(source), nbytes);
}
Code rbln_memcpy_v2h_async(uint64_t source, uint64_t destination, uint64_t nbytes, uint64_t* event) {
  *event = 0;
  return standin::Read("v2h_async", source, reinterpret_cast<void*>(destination), nbytes);
}

Code rbln_memcpy_h2v_multi(const Ranges& ranges) {
  standin::Log("h2v_multi ranges=" + std::to_string(ranges.size()));
  for (const auto& [source, destination, nbytes] : ranges) {
    const Code code = standin::Write("h2v", destination, reinterpret_cast<const void*>(source), nbytes);
    if (code != kOk) return code;
  }
  return kOk;
}
Code rbln_memcpy_v2h_multi(const Ranges& ranges) {
  standin::Log("v2h_multi ranges=" + std::to_string(ranges.size()));
  for (const auto& [source, destination, nbytes] : ranges) {
    const Code code = standin::Read("v2h", source, reinterpret_cast<void*>(destination), nbytes);
    if (code != kOk) return code;
  }
  return kOk;
}

Code rbln_get_torch_device_id_from_vaddr(uint64_t address, uint32_t& device) {
  device = standin::DeviceOf(address);
  return kOk;
}

Code rbln_device_synchronize(uint32_t device) {
  return standin::Synchronize(("synchronize device=" + std::to_string(device)).c_str());
}

}  // namespace rbln

extern "C" {

// The interface that torch-rbln 0.12.0 was built against. A test says otherwise to see the mismatch reported.
uint32_t rbln_abi_current() { return std::getenv("STANDIN_ABI") ? std::atoi(std::getenv("STANDIN_ABI")) : 6; }
uint32_t rbln_abi_min_supported() { return rbln_abi_current(); }

int rbln_runtime_available() { return 1; }
int rbln_empty_cache(int) { return kOk; }
int rbln_kineto_is_active() { return 0; }

int rbln_register_device_id(int device, const int* physical, int count) {
  const char* visible = std::getenv("RBLN_VISIBLE_DEVICES");
  std::string line = "register device=" + std::to_string(device) + " npus=";
  for (int index = 0; index < count; ++index) line += (index == 0 ? "" : ",") + std::to_string(physical[index]);
  standin::Log(line + " of visible=" + (visible == nullptr ? "all" : visible));
  return kOk;
}
}
