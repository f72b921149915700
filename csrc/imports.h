// The functions that a loaded library calls from others, and others in their place.
#pragma once

#include <vector>

namespace stronghold {

// Where a loaded library has the address of a function of another one, as ELF's relocations tell.
class Import {
 public:
  Import(void** slot, bool is_called, bool read_only) : slot_(slot), is_called_(is_called), read_only_(read_only) {}
  void* now() const;
  // Whether it is there to be called, and not to be told to others: the latter may be an entry of the program's own
  // table of calls, which leads to the function.
  bool is_called() const { return is_called_; }
  // Whether `function` is called from now on. False, and nothing changed, where the system does not allow it.
  bool replace(void* function) const;

 private:
  void** slot_;
  bool is_called_;
  bool read_only_;  // made so once the library was loaded
};

// Returns where the library whose file's name begins with `library` has the address of `function`: nothing where it is
// not loaded or does not call it, or where this machine's relocations are not known here.
std::vector<Import> imports_of(const char* library, const char* function);

}  // namespace stronghold
