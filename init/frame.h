/* The header of every message between a node and an init. No I/O, no allocation. */
#ifndef SHOAL_FRAME_H
#define SHOAL_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { FRAME_HEADER = 16, FRAME_PAYLOAD_MAX = 4 << 20, FRAME_DATA_MAX = 64 << 10 };

enum frame_kind {
    /* node to init */
    FRAME_SPAWN = 1,  /* start a program */
    FRAME_FILE = 2,   /* start a file operation */
    FRAME_INPUT = 3,  /* bytes for a command's stdin; an empty one closes it */
    FRAME_SIGNAL = 4, /* i32 signal, i32 scope: 0 process group, 1 everything the command started, 2 a session's shell alone,
                         and SIGKILL to what it started since it was sent something */
    FRAME_CREDIT = 5, /* u32: so many more bytes may be sent on `stream`; of stream 0: the next report may be */
    FRAME_RESIZE = 6, /* u16 rows, u16 columns */
    FRAME_NARROW = 15, /* list of the only paths to execute from now on, if not empty; or the tree for file operations */
    /* init to node */
    FRAME_READY = 16,
    FRAME_FAILED = 17,  /* set-up: u32 step, i32 errno, detail */
    FRAME_STARTED = 18, /* i32 pid */
    FRAME_REFUSED = 19, /* a command could not be started: i32 errno, u32 spawn_step */
    FRAME_OUTPUT = 20,  /* bytes of `stream` 1 or 2 */
    FRAME_EXIT = 21,    /* struct of frame.c's comment */
    FRAME_TAKEN = 22,   /* u32: so many bytes of input went into the command's stdin */
    FRAME_REPORT = 23,  /* of a session's shell: u32 OOM kills and u64 CPU microseconds since its last one, what it said */
};

struct frame {
    uint32_t length; /* of the payload */
    uint8_t kind;
    uint8_t stream; /* 1 stdout, 2 stderr */
    uint32_t id;    /* of the command */
    uint32_t number; /* counts frames of one direction from 0 */
};

enum frame_status { FRAME_WHOLE, FRAME_PARTIAL, FRAME_MALFORMED };

void frame_encode(const struct frame *f, uint8_t header[FRAME_HEADER]);

/* Decodes the header at the start of `data`. PARTIAL while the header or its payload is incomplete; the
 * payload then starts at data + FRAME_HEADER. MALFORMED is final: the stream can't be resynchronised. */
enum frame_status frame_decode(struct frame *f, const uint8_t *data, size_t length);

void put_u32(uint8_t *to, uint32_t value);
void put_u64(uint8_t *to, uint64_t value);
uint32_t get_u32(const uint8_t *from);
uint64_t get_u64(const uint8_t *from);

#endif
