/* A stream of frames as init's loop cuts it, and the requests within. */
#include <stdlib.h>
#include <string.h>

#include "init.h"
#include "request.h"

static void read_frame(const struct frame *f, const uint8_t *at) {
    uint8_t header[FRAME_HEADER];
    frame_encode(f, header);
    if (memcmp(header, at, FRAME_HEADER)) abort(); /* what was decoded is what was sent */
    if (f->kind == FRAME_SPAWN || f->kind == FRAME_FILE) read_request(at + FRAME_HEADER, f->length, f->kind == FRAME_FILE);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length) {
    struct frame f;
    while (frame_decode(&f, data, length) == FRAME_WHOLE) {
        if (f.length > length - FRAME_HEADER) abort();
        read_frame(&f, data);
        data += FRAME_HEADER + f.length;
        length -= FRAME_HEADER + f.length;
    }
    return 0;
}
