/* Decodes a request in memory of its exact size and reads all that it points to, so that a wrong byte is noticed. */
#include <stdlib.h>
#include <string.h>

#include "init.h"

_Noreturn void file_operation(const struct request *q) { /* spawn.c wants it; nothing is started here */
    (void)q;
    abort();
}

static size_t read_texts(char **texts) {
    size_t bytes = 0;
    for (; *texts; texts++) bytes += strlen(*texts) + 5;
    return bytes;
}

static void read_request(const uint8_t *payload, size_t length, bool file) {
    struct request q;
    struct frame f = {.length = (uint32_t)length};
    uint8_t *copy = malloc(length ? length : 1);
    memcpy(copy, payload, length);
    if (request_decode(&q, &f, copy, file)) {
        size_t bytes = strlen(q.cwd) + read_texts(q.argv) + read_texts(q.envp);
        if (!q.argv[0] || bytes > length || q.group_count > 64 || (q.operation > 0) != file) abort();
    }
    request_free(&q);
    free(copy);
}
