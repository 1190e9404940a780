// Whether a sanitizer that checks memory accesses is compiled in: loops that measure then measure
// the checks. g++ tells by macros, clang by features.
#pragma once

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define MOESAIC_INSTRUMENTED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define MOESAIC_INSTRUMENTED 1
#endif
#endif

#ifndef MOESAIC_INSTRUMENTED
#define MOESAIC_INSTRUMENTED 0
#endif
