/* Fails the n-th system call on files below given folders, once or from then on. Preloaded by tools/faults.py.

   PENSTOCK_FAULTS is "at:errno:times:folder[:folder…]". A call on a descriptor counts if the file was opened below one of
   the folders, by its path or from a folder's descriptor. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define DESCRIPTORS 65536
static _Atomic unsigned char watched[DESCRIPTORS];
static _Atomic long calls;
static long first, last;
static int number;
static char folders[4096];

/* Read the order again, and count from 0. */
void faults_arm(void) {
    const char *order = getenv("PENSTOCK_FAULTS");
    long times = 0;
    int used = 0;
    first = last = 0;
    folders[0] = 0;
    if (order && sscanf(order, "%ld:%d:%ld:%n", &first, &number, &times, &used) == 3 && used) {
        snprintf(folders, sizeof folders, "%s", order + used);
        last = first + times - 1;
    }
    atomic_store(&calls, 0);
}

long faults_count(void) { return atomic_load(&calls); }

__attribute__((constructor)) static void begin(void) { faults_arm(); }

static int below(const char *path) {
    if (!path) return 0;
    for (const char *at = folders; *at;) {
        size_t length = strcspn(at, ":");
        if (length && !strncmp(path, at, length) && (!path[length] || path[length] == '/')) return 1;
        at += length + (at[length] == ':');
    }
    return 0;
}

static int is_watched(int descriptor) { return descriptor >= 0 && descriptor < DESCRIPTORS && watched[descriptor]; }

static int below_at(int folder, const char *path) {
    if (path && path[0] == '/') return below(path);
    return is_watched(folder);
}

static int fails(int concerned) {
    if (!concerned || !folders[0]) return 0;
    long now = atomic_fetch_add(&calls, 1) + 1;
    if (now < first || now > last) return 0;
    errno = number;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL(concerned) if (fails(concerned)) return -1

static int opened(int descriptor, int concerned) {
    if (descriptor >= 0 && descriptor < DESCRIPTORS) watched[descriptor] = concerned;
    return descriptor;
}

static mode_t mode_of(int flags, va_list rest) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; }

#define OPEN(name)                                                                                     \
    int name(const char *path, int flags, ...) {                                                       \
        va_list rest;                                                                                  \
        va_start(rest, flags);                                                                         \
        mode_t mode = mode_of(flags, rest);                                                            \
        va_end(rest);                                                                                  \
        int concerned = below(path);                                                                   \
        FAIL(concerned);                                                                               \
        return opened(REAL(name)(path, flags, mode), concerned);                                       \
    }
#define OPENAT(name)                                                                                   \
    int name(int folder, const char *path, int flags, ...) {                                           \
        va_list rest;                                                                                  \
        va_start(rest, flags);                                                                         \
        mode_t mode = mode_of(flags, rest);                                                            \
        va_end(rest);                                                                                  \
        int concerned = below_at(folder, path);                                                        \
        FAIL(concerned);                                                                               \
        return opened(REAL(name)(folder, path, flags, mode), concerned);                               \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

#define ONE(type, name, concerned, parameters, arguments)                                              \
    type name parameters {                                                                             \
        FAIL(concerned);                                                                               \
        return REAL(name) arguments;                                                                   \
    }
ONE(ssize_t, read, is_watched(fd), (int fd, void *to, size_t n), (fd, to, n))
ONE(ssize_t, pread, is_watched(fd), (int fd, void *to, size_t n, off_t at), (fd, to, n, at))
ONE(ssize_t, pread64, is_watched(fd), (int fd, void *to, size_t n, off64_t at), (fd, to, n, at))
ONE(ssize_t, write, is_watched(fd), (int fd, const void *from, size_t n), (fd, from, n))
ONE(int, fsync, is_watched(fd), (int fd), (fd))
ONE(int, fstat, is_watched(fd), (int fd, struct stat *to), (fd, to))
ONE(int, fstat64, is_watched(fd), (int fd, struct stat64 *to), (fd, to))
ONE(int, stat, below(path), (const char *path, struct stat *to), (path, to))
ONE(int, stat64, below(path), (const char *path, struct stat64 *to), (path, to))
ONE(int, lstat, below(path), (const char *path, struct stat *to), (path, to))
ONE(int, lstat64, below(path), (const char *path, struct stat64 *to), (path, to))
ONE(int, fstatat, below_at(at, path), (int at, const char *path, struct stat *to, int flags), (at, path, to, flags))
ONE(int, fstatat64, below_at(at, path), (int at, const char *path, struct stat64 *to, int flags), (at, path, to, flags))
ONE(int, statx, below_at(at, path), (int at, const char *path, int flags, unsigned mask, struct statx *to),
    (at, path, flags, mask, to))
ONE(int, access, below(path), (const char *path, int mode), (path, mode))
ONE(int, mkdir, below(path), (const char *path, mode_t mode), (path, mode))
ONE(int, mkdirat, below_at(at, path), (int at, const char *path, mode_t mode), (at, path, mode))
ONE(int, rename, below(from) || below(to), (const char *from, const char *to), (from, to))
ONE(int, renameat, below_at(a, from) || below_at(b, to), (int a, const char *from, int b, const char *to),
    (a, from, b, to))
ONE(int, link, below(from) || below(to), (const char *from, const char *to), (from, to))
ONE(int, linkat, below_at(a, from) || below_at(b, to), (int a, const char *from, int b, const char *to, int flags),
    (a, from, b, to, flags))
ONE(int, unlink, below(path), (const char *path), (path))
ONE(int, unlinkat, below_at(at, path), (int at, const char *path, int flags), (at, path, flags))
ONE(int, futimens, is_watched(fd), (int fd, const struct timespec times[2]), (fd, times))
ONE(int, utimensat, below_at(at, path), (int at, const char *path, const struct timespec times[2], int flags),
    (at, path, times, flags))
ONE(int, fchmod, is_watched(fd), (int fd, mode_t mode), (fd, mode))
ONE(off_t, lseek, is_watched(fd), (int fd, off_t to, int from), (fd, to, from))
ONE(off64_t, lseek64, is_watched(fd), (int fd, off64_t to, int from), (fd, to, from))

/* A descriptor is closed whatever is said about it, as the kernel does. */
int close(int fd) {
    int concerned = is_watched(fd);
    if (concerned) watched[fd] = 0;
    int done = REAL(close)(fd);
    FAIL(concerned);
    return done;
}

int dup(int fd) { return opened(REAL(dup)(fd), is_watched(fd)); }

#define FCNTL(name)                                                                                    \
    int name(int fd, int what, ...) {                                                                  \
        va_list rest;                                                                                  \
        va_start(rest, what);                                                                          \
        void *argument = va_arg(rest, void *);                                                         \
        va_end(rest);                                                                                  \
        int done = REAL(name)(fd, what, argument);                                                     \
        return what == F_DUPFD || what == F_DUPFD_CLOEXEC ? opened(done, is_watched(fd)) : done;       \
    }
FCNTL(fcntl)
FCNTL(fcntl64)

#define MAP(name, offset)                                                                              \
    void *name(void *at, size_t n, int protection, int flags, int fd, offset from) {                   \
        if (fails(!(flags & MAP_ANONYMOUS) && is_watched(fd))) return MAP_FAILED;                      \
        return REAL(name)(at, n, protection, flags, fd, from);                                         \
    }
MAP(mmap, off_t)
MAP(mmap64, off64_t)

DIR *opendir(const char *path) {
    int concerned = below(path);
    if (fails(concerned)) return NULL;
    DIR *folder = REAL(opendir)(path);
    if (folder) opened(dirfd(folder), concerned);
    return folder;
}

DIR *fdopendir(int fd) {
    if (fails(is_watched(fd))) return NULL;
    return REAL(fdopendir)(fd);
}

/* Errors and the end of a folder differ by errno alone. */
struct dirent64 *readdir64(DIR *folder) {
    if (fails(is_watched(dirfd(folder)))) return NULL;
    return REAL(readdir64)(folder);
}

struct dirent *readdir(DIR *folder) {
    if (fails(is_watched(dirfd(folder)))) return NULL;
    return REAL(readdir)(folder);
}
