#include "imports.h"

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace stronghold {
namespace {

#if defined(__x86_64__)
constexpr std::uint32_t kSlots[] = {R_X86_64_JUMP_SLOT, R_X86_64_GLOB_DAT};
#elif defined(__aarch64__)
constexpr std::uint32_t kSlots[] = {R_AARCH64_JUMP_SLOT, R_AARCH64_GLOB_DAT};
#else
constexpr std::uint32_t kSlots[] = {0, 0};
#endif

struct Wanted {
  const char* library;
  const char* function;
  std::vector<Import> found;
};

struct Table {
  const ElfW(Rela)* entries = nullptr;
  std::size_t bytes = 0;
};

void look_into(const Table& table, const ElfW(Sym)* symbols, const char* names, const dl_phdr_info& info,
               const ElfW(Phdr)* relro, Wanted& wanted) {
  for (std::size_t i = 0; i < table.bytes / sizeof(ElfW(Rela)); ++i) {
    const ElfW(Rela)& entry = table.entries[i];
    const std::uint32_t type = ELF64_R_TYPE(entry.r_info);
    if (type != kSlots[0] && type != kSlots[1]) continue;
    if (std::strcmp(names + symbols[ELF64_R_SYM(entry.r_info)].st_name, wanted.function) != 0) continue;
    const bool read_only = relro != nullptr && entry.r_offset >= relro->p_vaddr &&
                           entry.r_offset < relro->p_vaddr + relro->p_memsz;
    wanted.found.emplace_back(reinterpret_cast<void**>(info.dlpi_addr + entry.r_offset), type == kSlots[0], read_only);
  }
}

int look(dl_phdr_info* info, std::size_t, void* data) {
  Wanted& wanted = *static_cast<Wanted*>(data);
  const char* slash = std::strrchr(info->dlpi_name, '/');
  const char* name = slash == nullptr ? info->dlpi_name : slash + 1;
  if (std::strncmp(name, wanted.library, std::strlen(wanted.library)) != 0) return 0;
  const ElfW(Dyn)* dynamic = nullptr;
  const ElfW(Phdr)* relro = nullptr;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& header = info->dlpi_phdr[i];
    if (header.p_type == PT_DYNAMIC) dynamic = reinterpret_cast<const ElfW(Dyn)*>(info->dlpi_addr + header.p_vaddr);
    if (header.p_type == PT_GNU_RELRO) relro = &header;
  }
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  Table calls, others;
  for (const ElfW(Dyn)* entry = dynamic; entry != nullptr && entry->d_tag != DT_NULL; ++entry) {
    switch (entry->d_tag) {
      case DT_SYMTAB: symbols = reinterpret_cast<const ElfW(Sym)*>(entry->d_un.d_ptr); break;
      case DT_STRTAB: names = reinterpret_cast<const char*>(entry->d_un.d_ptr); break;
      case DT_JMPREL: calls.entries = reinterpret_cast<const ElfW(Rela)*>(entry->d_un.d_ptr); break;
      case DT_PLTRELSZ: calls.bytes = entry->d_un.d_val; break;
      case DT_RELA: others.entries = reinterpret_cast<const ElfW(Rela)*>(entry->d_un.d_ptr); break;
      case DT_RELASZ: others.bytes = entry->d_un.d_val; break;
      default: break;
    }
  }
  if (symbols == nullptr || names == nullptr) return 1;
  for (const Table& table : {calls, others})
    if (table.entries != nullptr) look_into(table, symbols, names, *info, relro, wanted);
  return 1;
}

}  // namespace

void* Import::now() const { return __atomic_load_n(slot_, __ATOMIC_ACQUIRE); }

bool Import::replace(void* function) const {
  const std::uintptr_t page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  void* const begin = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(slot_) & ~(page - 1));
  if (read_only_ && mprotect(begin, page, PROT_READ | PROT_WRITE) != 0) return false;
  __atomic_store_n(slot_, function, __ATOMIC_RELEASE);
  if (read_only_) mprotect(begin, page, PROT_READ);  // or else it stays as it was while the library was loaded
  return true;
}

std::vector<Import> imports_of(const char* library, const char* function) {
  Wanted wanted{library, function, {}};
  if (kSlots[0] != 0) dl_iterate_phdr(&look, &wanted);
  return std::move(wanted.found);
}

}  // namespace stronghold
