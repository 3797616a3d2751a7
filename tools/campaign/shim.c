/* Faults of a disk, in one process tree and below given folders: a library for LD_PRELOAD.

   A page that the processes share (struct control) says which fault, and counts. Each call that reads or writes a file
   below one of the folders is an operation, and has a number; the fault strikes at operation `at` (and, if `lasting`, at
   all later ones). With `budget` >= 0 the disk has room for that many bytes more. Python fills the page in; see shim.py.

   With `audit` the order of writes and syncs is checked as well. What a file was given must be synced before more is
   appended to it, before its process writes anything elsewhere (which may say that it is done), and before the file is
   closed, renamed, or left at the end; the folder of a new name must be synced by the end.
*/
#define _GNU_SOURCE
#define _LARGEFILE64_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { READS = 1, WRITES = 2, SYNCS = 4, NAMES = 8, OPENS = 16 };           /* kinds of operations: control.kinds */
enum { NONE, FULL, FAIL, KILL, TORN, VANISH, COUNT };                       /* control.mode */

struct control {
    volatile int mode, kinds, error, lasting;
    volatile long at, budget;
    volatile long operations, hits, written;
    char folders[2][2048];
    volatile int audit;
    volatile long unsynced; /* faults in the order of writes and syncs; `first` is the first one */
    char first[1024];
};

static struct control *page;

__attribute__((constructor)) static void begin(void) {
    const char *name = getenv("ZINFER_SHIM");
    if (name == NULL) return;
    int file = open(name, O_RDWR | O_CLOEXEC);
    if (file < 0) return;
    void *found = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) page = found;
    close(file);
}

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

static int below(const char *path) {
    for (int i = 0; i < 2; i++) {
        const char *folder = (const char *)page->folders[i];
        size_t length = strlen(folder);
        if (length && !strncmp(path, folder, length) && (path[length] == '/' || path[length] == 0)) return 1;
    }
    return 0;
}

static int link_of(int file, char whole[PATH_MAX]) { /* the path of an open file or folder; 0 if it has none */
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, whole, PATH_MAX - 1);
    whole[length < 0 ? 0 : length] = 0;
    return length >= 0;
}
static int path_of(int file, char whole[PATH_MAX]) { return link_of(file, whole) && below(whole); }

static int concerns_file(int file) {
    char whole[PATH_MAX];
    return page != NULL && page->mode != NONE && file >= 0 && path_of(file, whole);
}
static int concerns_path(int folder, const char *path) {
    char whole[PATH_MAX * 2];
    if (page == NULL || page->mode == NONE || path == NULL) return 0;
    if (path[0] == '/') return below(path);
    if (folder == AT_FDCWD ? getcwd(whole, PATH_MAX) == NULL : !link_of(folder, whole)) return 0;
    size_t length = strlen(whole);
    snprintf(whole + length, sizeof whole - length, "/%s", path);
    return below(whole);
}

/* Count an operation of `kind`; return 0 to let it happen, else the errno that it ends with, or -1 for a torn write. */
static int strike(int kind, long bytes) {
    struct control *c = page;
    int mode = c->mode;
    if (mode == FULL) {
        if (kind != WRITES && kind != NAMES) return 0;
        __sync_fetch_and_add(&c->operations, 1);
        long before = __sync_fetch_and_add(&c->written, bytes);
        if (before + bytes <= c->budget && !(kind == NAMES && before >= c->budget)) return 0;
        __sync_fetch_and_add(&c->hits, 1);
        return ENOSPC;
    }
    if (!(c->kinds & kind)) return 0;
    long number = __sync_fetch_and_add(&c->operations, 1);
    if (mode == COUNT) __sync_fetch_and_add(&c->written, bytes);
    if (mode == COUNT || number < c->at || (number > c->at && !c->lasting)) return 0;
    __sync_fetch_and_add(&c->hits, 1);
    switch (mode) {
    case TORN:
        if (kind == WRITES && bytes > 1) return -1;
        /* fall through */
    case KILL:
        raise(SIGKILL);
        return 0;
    case VANISH: {
        char gone[2100];
        snprintf(gone, sizeof gone, "%s.gone", (const char *)c->folders[0]);
        if (number == c->at) REAL(rename)((const char *)c->folders[0], gone);
        return 0;
    }
    default:
        return c->error;
    }
}

/* What this process has written and not synced: files, and folders with new names. */
struct entry {
    dev_t device;
    ino_t number;
    long thread; /* that wrote */
    int appends, folder;
    char path[512];
};
static struct entry entries[64];
static int held;
static volatile int busy;

static int lock_entries(void) {
    if (page == NULL || !page->audit) return 0;
    while (__sync_lock_test_and_set(&busy, 1)) {
    }
    return 1;
}
static void unlock_entries(void) { __sync_lock_release(&busy); }
static void forked(void) { held = busy = 0; } /* those entries are the parent's */
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forked); }

static void blame(const struct entry *one, const char *fault) {
    if (!__sync_fetch_and_add(&page->unsynced, 1)) snprintf(page->first, sizeof page->first, "%s %s", one->path, fault);
}
static struct entry *entry_of(const struct stat *status) {
    for (int i = 0; i < held; i++)
        if (entries[i].device == status->st_dev && entries[i].number == status->st_ino) return &entries[i];
    return NULL;
}
static void drop(struct entry *one) {
    if (one != NULL) *one = entries[--held];
}
static void note(const struct stat *status, const char *path, int appends) {
    if (entry_of(status) != NULL || held == sizeof entries / sizeof *entries) return;
    struct entry *one = &entries[held++];
    one->device = status->st_dev, one->number = status->st_ino, one->thread = syscall(SYS_gettid);
    one->appends = appends, one->folder = S_ISDIR(status->st_mode);
    snprintf(one->path, sizeof one->path, "%s", path);
}

static void named(const char *path) { /* there is a new name: `path`, absolute */
    char folder[PATH_MAX];
    struct stat status;
    snprintf(folder, sizeof folder, "%s", path);
    char *last = strrchr(folder, '/');
    if (last == NULL || last == folder) return;
    *last = 0;
    if (below(folder) && !stat(folder, &status)) note(&status, folder, 0);
}

static void wrote(int file, int appending) {
    char path[PATH_MAX];
    struct stat status;
    int error = errno;
    if (lock_entries()) {
        if (!path_of(file, path)) {
            for (int i = 0; i < held; i++)
                if (entries[i].appends && entries[i].thread == syscall(SYS_gettid))
                    blame(&entries[i], "was not synced before something else was written");
        } else if (!fstat(file, &status) && S_ISREG(status.st_mode)) {
            int appends = !!(fcntl(file, F_GETFL) & O_APPEND);
            struct entry *one = entry_of(&status);
            if (one != NULL && appends && appending) blame(one, "was not synced before the next lines");
            note(&status, path, appends);
        }
        unlock_entries();
    }
    errno = error;
}
static void synced(int file) {
    struct stat status;
    if (!lock_entries()) return;
    if (!fstat(file, &status)) drop(entry_of(&status));
    unlock_entries();
}
static void opened(int file, int made) {
    char path[PATH_MAX];
    if (file < 0 || !made || !lock_entries()) return;
    if (path_of(file, path) && fcntl(file, F_GETFL) & O_APPEND) named(path);
    unlock_entries();
}
static void closing(int file) {
    struct stat status;
    if (!lock_entries()) return;
    struct entry *one = held && !fstat(file, &status) ? entry_of(&status) : NULL;
    if (one != NULL && one->appends) {
        blame(one, "was not synced before it was closed");
        drop(one);
    }
    unlock_entries();
}
static void renamed(int folder, const char *path) { /* a file has got the name `path` */
    struct stat status;
    char whole[PATH_MAX] = "";
    if (!lock_entries()) return;
    int file = openat(folder, path, O_PATH | O_CLOEXEC);
    if (file >= 0 && path_of(file, whole) && !fstat(file, &status)) {
        struct entry *one = entry_of(&status);
        if (one != NULL && !one->folder) {
            blame(one, "was not synced before it was renamed");
            drop(one);
        }
        if (S_ISREG(status.st_mode)) named(whole);
    }
    if (file >= 0) syscall(SYS_close, file);
    unlock_entries();
}
static void leaving(void) {
    struct stat status;
    if (!lock_entries()) return;
    for (int i = 0; i < held; i++)
        if (!stat(entries[i].path, &status) && status.st_ino == entries[i].number)
            blame(&entries[i], entries[i].folder ? "got a new name, and was not synced" : "was not synced before the end");
    held = 0;
    unlock_entries();
}
void _exit(int code) {
    leaving();
    REAL(_exit)(code);
    __builtin_unreachable();
}
int close(int file) {
    closing(file);
    return REAL(close)(file);
}

#define FAULT(concerned, kind, bytes, failed)                                                                          \
    if (concerned) {                                                                                                   \
        int fault = strike(kind, bytes);                                                                               \
        if (fault > 0) {                                                                                               \
            errno = fault;                                                                                             \
            return failed;                                                                                             \
        }                                                                                                              \
    }
#define PATH_FAULT(folder, path, kind, failed) FAULT(concerns_path(folder, path), kind, 0, failed)
#define FILE_FAULT(file, kind, bytes) FAULT(concerns_file(file), kind, bytes, -1)

/* The kind of an open: one that may write counts as a change of names; a full disk has room for files that are there. */
static int opens(int folder, const char *path, int flags) {
    if (page != NULL && page->mode == FULL && (!(flags & O_CREAT) || !faccessat(folder, path, F_OK, 0))) return OPENS;
    return flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR) ? NAMES : OPENS;
}
static mode_t mode_of(int flags, va_list more) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; }

#define OPEN(name, parameters, folder, ...)                                                                            \
    int name parameters {                                                                                              \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode_t mode = mode_of(flags, more);                                                                            \
        va_end(more);                                                                                                  \
        PATH_FAULT(folder, path, opens(folder, path, flags), -1)                                                       \
        int made = flags & O_CREAT && page != NULL && page->audit && faccessat(folder, path, F_OK, 0);                 \
        int file = REAL(name)(__VA_ARGS__, flags, mode);                                                               \
        opened(file, made);                                                                                            \
        return file;                                                                                                   \
    }
OPEN(open, (const char *path, int flags, ...), AT_FDCWD, path)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, path)
OPEN(openat, (int folder, const char *path, int flags, ...), folder, folder, path)
OPEN(openat64, (int folder, const char *path, int flags, ...), folder, folder, path)
#define FOPEN(name)                                                                                                    \
    FILE *name(const char *path, const char *mode) {                                                                   \
        PATH_FAULT(AT_FDCWD, path, mode[0] == 'r' ? OPENS : NAMES, NULL)                                               \
        return REAL(name)(path, mode);                                                                                 \
    }
FOPEN(fopen)
FOPEN(fopen64)

/* A full disk takes the bytes that it has room for; a torn write ends in the middle, and the process with it. */
#define WRITE(name, parameters, arguments, shorter)                                                                    \
    ssize_t name parameters {                                                                                          \
        if (concerns_file(file)) {                                                                                     \
            long before = page->written;                                                                               \
            int fault = strike(WRITES, (long)count);                                                                   \
            if (fault == ENOSPC && page->mode == FULL && before < page->budget) {                                      \
                count = page->budget - before;                                                                         \
                return REAL(name) shorter;                                                                             \
            }                                                                                                          \
            if (fault > 0) {                                                                                           \
                errno = fault;                                                                                         \
                return -1;                                                                                             \
            }                                                                                                          \
            if (fault < 0) {                                                                                           \
                count = count / 2;                                                                                     \
                if (REAL(name) shorter >= 0) raise(SIGKILL);                                                           \
            }                                                                                                          \
        }                                                                                                              \
        ssize_t done = REAL(name) arguments;                                                                           \
        if (done >= 0) wrote(file, 1);                                                                                 \
        return done;                                                                                                   \
    }
WRITE(write, (int file, const void *data, size_t count), (file, data, count), (file, data, count))
WRITE(pwrite, (int file, const void *data, size_t count, off_t at), (file, data, count, at), (file, data, count, at))
WRITE(pwrite64, (int file, const void *data, size_t count, off64_t at), (file, data, count, at),
      (file, data, count, at))

ssize_t writev(int file, const struct iovec *parts, int number) {
    long bytes = 0;
    for (int i = 0; i < number; i++) bytes += parts[i].iov_len;
    FILE_FAULT(file, WRITES, bytes)
    ssize_t done = REAL(writev)(file, parts, number);
    if (done >= 0) wrote(file, 1);
    return done;
}

#define READ(name, parameters, arguments)                                                                              \
    ssize_t name parameters {                                                                                          \
        FILE_FAULT(file, READS, 0)                                                                                     \
        return REAL(name) arguments;                                                                                   \
    }
READ(read, (int file, void *data, size_t count), (file, data, count))
READ(pread, (int file, void *data, size_t count, off_t at), (file, data, count, at))
READ(pread64, (int file, void *data, size_t count, off64_t at), (file, data, count, at))
READ(readv, (int file, const struct iovec *parts, int number), (file, parts, number))

#define CHANGE(name, parameters, arguments, kind, noted)                                                               \
    int name parameters {                                                                                              \
        FILE_FAULT(file, kind, 0)                                                                                      \
        int failed = REAL(name) arguments;                                                                             \
        if (!failed) noted;                                                                                            \
        return failed;                                                                                                 \
    }
CHANGE(fsync, (int file), (file), SYNCS, synced(file))
CHANGE(fdatasync, (int file), (file), SYNCS, synced(file))
CHANGE(ftruncate, (int file, off_t size), (file, size), WRITES, wrote(file, 0))
CHANGE(ftruncate64, (int file, off64_t size), (file, size), WRITES, wrote(file, 0))
#define ALLOCATE(name, offset)                                                                                         \
    int name(int file, offset from, offset size) {                                                                     \
        int fault = concerns_file(file) ? strike(WRITES, size) : 0;                                                    \
        return fault > 0 ? fault : REAL(name)(file, from, size);                                                       \
    }
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)
#define NEW(name, parameters, arguments, folder, path)                                                                 \
    int name parameters {                                                                                              \
        PATH_FAULT(folder, path, NAMES, -1)                                                                            \
        return REAL(name) arguments;                                                                                   \
    }
NEW(link, (const char *from, const char *to), (from, to), AT_FDCWD, to)
NEW(mkdir, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path)
NEW(mkdirat, (int folder, const char *path, mode_t mode), (folder, path, mode), folder, path)

/* A full disk lets names change and go; the other faults may strike here, too. */
#define LEAVE(name, parameters, arguments, folder, path)                                                               \
    int name parameters {                                                                                              \
        if (page != NULL && page->mode != FULL) PATH_FAULT(folder, path, NAMES, -1)                                    \
        return REAL(name) arguments;                                                                                   \
    }
#define RENAME(name, parameters, arguments, folder)                                                                    \
    int name parameters {                                                                                              \
        if (page != NULL && page->mode != FULL) PATH_FAULT(folder, to, NAMES, -1)                                      \
        int failed = REAL(name) arguments;                                                                             \
        if (!failed) renamed(folder, to);                                                                              \
        return failed;                                                                                                 \
    }
RENAME(rename, (const char *from, const char *to), (from, to), AT_FDCWD)
RENAME(renameat, (int one, const char *from, int other, const char *to), (one, from, other, to), other)
LEAVE(unlink, (const char *path), (path), AT_FDCWD, path)
LEAVE(unlinkat, (int folder, const char *path, int flags), (folder, path, flags), folder, path)
LEAVE(rmdir, (const char *path), (path), AT_FDCWD, path)
