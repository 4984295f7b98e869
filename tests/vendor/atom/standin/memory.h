// The stand-in's memory: allocations by virtual address, a log of calls, and faults. See runtime.cpp.
#pragma once

#include <cstdint>
#include <string>

namespace standin {

// What a call of the runtime library returns. Only "zero is success" is known of the vendor's codes.
using Code = int;
constexpr Code kOk = 0;
constexpr Code kFailed = 1;

Code Allocate(uint32_t device, uint64_t nbytes, uint64_t* address);
Code Free(uint64_t address);
Code Write(const char* call, uint64_t address, const void* source, uint64_t nbytes);
Code Read(const char* call, uint64_t address, void* destination, uint64_t nbytes);
Code Copy(uint64_t source, uint64_t destination, uint64_t nbytes);
Code Zero(uint64_t address);
Code Synchronize(const char* call);
uint32_t DeviceOf(uint64_t address);
uint64_t LiveBytes();
uint64_t PeakBytes();

// One line in the log: the call, and what it was asked for.
void Log(const std::string& line);

}  // namespace standin
