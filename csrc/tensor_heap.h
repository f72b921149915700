// Memory for PyTorch's tensors on the CPU, in place of the C library's.
//
// PyTorch asks the C library for each tensor's memory by posix_memalign, to 64 bytes. glibc takes a block that is 96
// bytes longer and cuts it to size. What it cuts off goes to the next small object, which lies between the tensor and
// what was its own before: once freed, that range is too short for another tensor as long, as steps alike make them.
// Over a few steps a heap is up to a half larger than what was ever in it at once. Here a block goes into the
// smallest range that has room, and small objects are not between them.
//
// Only libc10.so's own calls of posix_memalign and free come here, which make and give back the memory of all tensors
// on the CPU but those that others made (NumPy, a file's mapping). Blocks of less than 64 KiB are the C library's.
#pragma once

#include <cstdint>
#include <utility>

namespace stronghold {

// Has large tensors' memory from here (`on`) or from the C library, which has it until the first call. What was made
// here before stays valid, and goes back to the system at once when it is freed while not `on`. Returns false, where
// it cannot be `on`: libc10.so calls another allocator, or is another library, or addresses are limited.
bool tensor_heap(bool on);

// Has it keep blocks of 32 MiB and more that are freed for the next ones, as it keeps all smaller ones. Else the
// system has to clear the memory of each.
void tensor_heap_keeps(bool large);

// Gives what is free in it back to the system. It is taken again, and cleared by the system, when it is needed.
void trim_tensor_heap();

// Returns how far it ever reached, and what is taken of it now, in bytes.
std::pair<std::int64_t, std::int64_t> tensor_heap_bytes();

}  // namespace stronghold
