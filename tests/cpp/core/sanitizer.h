#pragma once

namespace castor {

/// Whether ThreadSanitizer watches, under which a test takes ten times as long: what computes on
/// one thread alone, or repeats one thing many times, needs no more than a part of its cases there.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif

}  // namespace castor
