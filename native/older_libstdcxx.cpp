// A function that headers of GCC 11 and later call, and libstdc++ before GCC 11 lacks. With its own
// copy the library also loads beside older libstdc++.
#include <new>

#if defined(__GLIBCXX__) && _GLIBCXX_RELEASE >= 11
namespace std {
[[noreturn]] void __throw_bad_array_new_length();
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
#endif
