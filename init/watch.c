/* What happens to a file, a folder or a tree, by inotify, as records on descriptor 1:
 *   u32 event | u32 is a directory | u32 n, path | u32 m, old path of what was renamed
 * Paths are relative to what is watched. Folders that appear in a tree are watched and then looked through, so that what was
 * made in them before is told; it may be told twice. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <unistd.h>

#include "files.h"

enum event { READY = 1, CREATED, MODIFIED, CLOSED, REMOVED, RENAMED, ATTRIBUTES, OVERFLOW };
enum { BUCKETS = 1024, RENAME_MS = 20 };
static const uint32_t MASK = IN_CREATE | IN_MODIFY | IN_CLOSE_WRITE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_ATTRIB |
                             IN_DELETE_SELF | IN_MOVE_SELF | IN_DONT_FOLLOW | IN_EXCL_UNLINK;

struct folder {
    int wd;
    struct folder *next;
    char *path; /* relative; "" for what is watched */
};
static struct folder *folders[BUCKETS];
static int inotify, root_wd;
static bool whole_tree;
static const char *root;

/* Half of a rename: the other follows at once, unless it went to where we do not look. */
static struct {
    uint32_t cookie;
    bool directory;
    char *path;
} leaving;

/* ---- records --------------------------------------------------------------------------------- */

static void put_text(const char *text) {
    uint8_t length[4];
    put_u32(length, (uint32_t)strlen(text));
    put_bytes(length, 4);
    put_bytes(text, strlen(text));
}

static void tell(enum event event, bool directory, const char *path, const char *old) {
    uint8_t head[8];
    put_u32(head, event);
    put_u32(head + 4, directory);
    put_bytes(head, 8);
    put_text(path);
    put_text(old);
}

/* ---- folders --------------------------------------------------------------------------------- */

static char *joined(const char *folder, const char *name) {
    const char *slash = *folder && *name ? "/" : "";
    char *path = allocate(strlen(folder) + strlen(name) + 2);
    sprintf(path, "%s%s%s", folder, slash, name);
    return path;
}

static struct folder *find(int wd) {
    struct folder *f = folders[wd % BUCKETS];
    while (f && f->wd != wd) f = f->next;
    return f;
}

static void remember(int wd, const char *path) {
    struct folder *f = find(wd);
    if (!f) {
        f = allocate(sizeof *f);
        *f = (struct folder){wd, folders[wd % BUCKETS], NULL};
        folders[wd % BUCKETS] = f;
    }
    free(f->path);
    f->path = joined(path, "");
}

static void forget(int wd) {
    struct folder **at = &folders[wd % BUCKETS];
    while (*at && (*at)->wd != wd) at = &(*at)->next;
    struct folder *f = *at;
    if (!f) return;
    *at = f->next;
    free(f->path);
    free(f);
}

static bool is_below(const char *path, const char *folder) {
    size_t length = strlen(folder);
    return !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

/* A folder of the tree has another name, or none that we watch: the kernel goes on watching what was below it. */
static void move_folders(const char *old, const char *new) {
    for (size_t i = 0; i < BUCKETS; i++)
        for (struct folder *f = folders[i], *next; f; f = next) {
            next = f->next;
            if (!is_below(f->path, old)) continue;
            if (!new) {
                inotify_rm_watch(inotify, f->wd);
                forget(f->wd);
                continue;
            }
            char *path = joined(new, f->path + strlen(old) + (f->path[strlen(old)] == '/'));
            free(f->path);
            f->path = path;
        }
}

static void watch_tree(const char *path, bool announce);

static void look_through(const char *folder, const char *path, bool announce) {
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    if (!directory && !is_gone(errno)) tell(OVERFLOW, true, path, "");
    for (struct dirent *entry; directory && (entry = readdir(directory));) {
        struct stat st;
        if (is_dot(entry->d_name) || fstatat(fd, entry->d_name, &st, AT_SYMLINK_NOFOLLOW)) continue;
        char *below = joined(path, entry->d_name);
        if (announce) tell(CREATED, S_ISDIR(st.st_mode), below, "");
        if (S_ISDIR(st.st_mode)) watch_tree(below, announce);
        free(below);
    }
    if (directory) closedir(directory);
}

/* Watched first and looked at after: what comes between is told twice and not left out. */
static void watch_tree(const char *path, bool announce) {
    char *folder = joined(root, path);
    int wd = inotify_add_watch(inotify, folder, MASK | IN_ONLYDIR);
    if (wd < 0 && errno == ENOSPC) finish(EUSERS);
    if (wd >= 0) {
        remember(wd, path);
        look_through(folder, path, announce);
    } else if (!is_gone(errno)) {
        tell(OVERFLOW, true, path, "");
    }
    free(folder);
}

/* ---- events ---------------------------------------------------------------------------------- */

static void give_up_rename(void) {
    if (!leaving.path) return;
    tell(REMOVED, leaving.directory, leaving.path, "");
    if (leaving.directory) move_folders(leaving.path, NULL);
    free(leaving.path);
    leaving.path = NULL;
}

static void arrive(const struct inotify_event *e, const char *path, bool directory) {
    if (leaving.path && leaving.cookie == e->cookie) {
        tell(RENAMED, directory, path, leaving.path);
        if (directory) move_folders(leaving.path, path);
        free(leaving.path);
        leaving.path = NULL;
        return;
    }
    tell(CREATED, directory, path, "");
    if (directory && whole_tree) watch_tree(path, true);
}

static void leave(const struct inotify_event *e, const char *path, bool directory) {
    leaving.cookie = e->cookie;
    leaving.directory = directory;
    leaving.path = joined(path, "");
}

static void take_event(const struct inotify_event *e) {
    const struct folder *f = find(e->wd);
    bool directory = e->mask & IN_ISDIR;
    if (leaving.path && !(e->mask & IN_MOVED_TO && e->cookie == leaving.cookie)) give_up_rename();
    if (e->mask & IN_Q_OVERFLOW) {
        tell(OVERFLOW, true, "", "");
        if (whole_tree) watch_tree("", false); /* folders may have come that we do not know of */
        return;
    }
    if (e->wd == root_wd && e->mask & (IN_DELETE_SELF | IN_MOVE_SELF | IN_UNMOUNT | IN_IGNORED)) {
        put_flush();
        finish(ENOENT);
    }
    if (e->mask & IN_IGNORED) forget(e->wd);
    if (!f || e->mask & (IN_DELETE_SELF | IN_MOVE_SELF | IN_UNMOUNT | IN_IGNORED)) return;
    if (!e->len && e->wd != root_wd) return; /* a folder's own, which the one above tells as well */
    char *path = joined(f->path, e->len ? e->name : "");
    if (e->mask & IN_CREATE) arrive(e, path, directory);
    if (e->mask & IN_MOVED_TO) arrive(e, path, directory);
    if (e->mask & IN_MODIFY) tell(MODIFIED, directory, path, "");
    if (e->mask & IN_CLOSE_WRITE) tell(CLOSED, directory, path, "");
    if (e->mask & IN_ATTRIB) tell(ATTRIBUTES, directory, path, "");
    if (e->mask & IN_DELETE) tell(REMOVED, directory, path, "");
    if (e->mask & IN_MOVED_FROM) leave(e, path, directory);
    free(path);
}

_Noreturn static void follow(void) {
    static char events[CHUNK] __attribute__((aligned(8)));
    struct pollfd waiting[2] = {{.fd = inotify, .events = POLLIN}, {.fd = 1}};
    for (;;) {
        int ready = poll(waiting, 2, leaving.path ? RENAME_MS : -1);
        if (!ready) give_up_rename();
        if (waiting[1].revents) finish(EPIPE); /* nobody reads any more */
        ssize_t got = ready > 0 ? read(inotify, events, sizeof events) : 0;
        for (ssize_t at = 0; at < got;) {
            const struct inotify_event *e = (const void *)(events + at);
            take_event(e);
            at += (ssize_t)(sizeof *e + e->len);
        }
        put_flush();
    }
}

_Noreturn void watch_path(const char *path, bool recursive) {
    static char real[PATH_MAX];
    struct stat st;
    working_at(path);
    check(realpath(path, real) != NULL && !lstat(real, &st));
    root = real;
    check(!chdir("/")); /* the kernel tells of a folder's end when nobody is in it any more */
    whole_tree = recursive && S_ISDIR(st.st_mode);
    inotify = inotify_init1(IN_CLOEXEC);
    if (inotify < 0) finish(errno == EMFILE ? EUSERS : errno);
    root_wd = inotify_add_watch(inotify, real, MASK);
    if (root_wd < 0) finish(errno == ENOSPC ? EUSERS : errno);
    remember(root_wd, "");
    if (whole_tree) look_through(real, "", false);
    tell(READY, S_ISDIR(st.st_mode), "", "");
    put_flush();
    follow();
}
