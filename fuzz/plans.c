/* Plans, with every system call a stub: no operation may read past its plan, or use or close what is not open.
 *
 * The first four bytes decide which calls fail. What a sandbox's own process would do is walked as part of a plan. */
#include "calls.h"

_Noreturn void init_main(struct setup *s) { /* no clone comes back in the child here */
    (void)s;
    abort();
}

int spawner_mounts(pid_t pid) { return pid & 1 ? new_fd() : -1; }

#include "access.c"
#include "mounts.c"
#include "namespaces.c"
#include "sandbox.c"
#include "setup.c"
#include "util.c"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length) {
    static int kept[KEPT_MAX];
    static struct setup s;
    if (length < 4) return 0;
    memset(kept, 0, sizeof kept);
    luck = get_u32(data);
    depth = 0;
    opened = 2;
    is_open[0] = is_open[1] = true; /* what was sent along with the plan */
    size_t count = length - 4;
    uint8_t *plan = malloc(count ? count : 1); /* of the exact size, so that one byte more is noticed */
    memcpy(plan, data + 4, count);
    int fds[] = {FIRST, FIRST + 1};
    setup_init(&s, kept, plan, count, fds, 2);
    setup_run(&s);
    if (depth || s.reply_count > REPLY_FDS_MAX || strnlen(s.detail, sizeof s.detail) == sizeof s.detail) abort();
    for (size_t i = 0; i < REGISTERS; i++)
        if (s.registers[i] > 0) stub_close(s.registers[i]);
    for (size_t i = 0; i < s.reply_count; i++) stub_close(s.reply[i]);
    free(plan);
    return 0;
}
