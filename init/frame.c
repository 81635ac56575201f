/* Layout, little-endian:  u32 length | u8 kind | u8 stream | u16 zero | u32 id | u32 number | payload
 *
 * EXIT payload: i32 wait status | u32 oom kills | u64 duration ns | u64 cpu us | u64 peak memory bytes | u32 processes
 * refused */
#include "frame.h"

void put_u32(uint8_t *to, uint32_t value) {
    for (int i = 0; i < 4; i++) to[i] = (uint8_t)(value >> (8 * i));
}

void put_u64(uint8_t *to, uint64_t value) {
    put_u32(to, (uint32_t)value);
    put_u32(to + 4, (uint32_t)(value >> 32));
}

uint32_t get_u32(const uint8_t *from) {
    return (uint32_t)from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 | (uint32_t)from[3] << 24;
}

uint64_t get_u64(const uint8_t *from) {
    return (uint64_t)get_u32(from) | (uint64_t)get_u32(from + 4) << 32;
}

void frame_encode(const struct frame *f, uint8_t header[FRAME_HEADER]) {
    put_u32(header, f->length);
    header[4] = f->kind;
    header[5] = f->stream;
    header[6] = header[7] = 0;
    put_u32(header + 8, f->id);
    put_u32(header + 12, f->number);
}

enum frame_status frame_decode(struct frame *f, const uint8_t *data, size_t length) {
    if (length < FRAME_HEADER) return FRAME_PARTIAL;
    f->length = get_u32(data);
    f->kind = data[4];
    f->stream = data[5];
    f->id = get_u32(data + 8);
    f->number = get_u32(data + 12);
    if (f->length > FRAME_PAYLOAD_MAX || f->stream > 2 || data[6] != 0 || data[7] != 0) return FRAME_MALFORMED;
    bool known = (f->kind >= FRAME_SPAWN && f->kind <= FRAME_RESIZE) || f->kind == FRAME_NARROW ||
                 (f->kind >= FRAME_READY && f->kind <= FRAME_REPORT);
    if (!known) return FRAME_MALFORMED;
    return length - FRAME_HEADER < f->length ? FRAME_PARTIAL : FRAME_WHOLE;
}
