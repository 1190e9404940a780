/* Loaded before everything else (LD_PRELOAD), counts what this process asks of malloc and its kin, on all threads.
   C++'s operator new asks malloc; so do NumPy and PyTorch. Small Python objects do not: they have arenas of their own.
   What the OpenMP runtime keeps of a team (libgomp: one record for a region of other size than the last) is counted
   apart. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);

static atomic_long count, count_of_openmp;
static atomic_int counting;

/* From here on; before, asking who calls costs more than it tells. */
void count_allocations(int on) { counting = on; }
long allocations(void) { return count; }
long allocations_of_openmp(void) { return count_of_openmp; }

static void note(void* caller) {
  if (!counting) return;
  Dl_info from;
  const char* file = dladdr(caller, &from) != 0 && from.dli_fname != NULL ? from.dli_fname : "";
  if (strstr(file, "libgomp") != NULL || strstr(file, "libomp") != NULL || strstr(file, "libiomp") != NULL) {
    ++count_of_openmp;
  } else {
    ++count;
  }
}

#define NOTE note(__builtin_return_address(0))

void* malloc(size_t size) {
  NOTE;
  return __libc_malloc(size);
}
void* calloc(size_t members, size_t size) {
  NOTE;
  return __libc_calloc(members, size);
}
void* realloc(void* block, size_t size) {
  NOTE;
  return __libc_realloc(block, size);
}
void* memalign(size_t alignment, size_t size) {
  NOTE;
  return __libc_memalign(alignment, size);
}
void* aligned_alloc(size_t alignment, size_t size) {
  NOTE;
  return __libc_memalign(alignment, size);
}
int posix_memalign(void** block, size_t alignment, size_t size) {
  NOTE;
  *block = __libc_memalign(alignment, size);
  return *block == NULL && size != 0 ? ENOMEM : 0;
}
