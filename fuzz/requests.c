/* The payload of one SPAWN or FILE frame; the first byte says which. */
#include "init.h"
#include "request.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length) {
    if (length) read_request(data + 1, length - 1, data[0] & 1);
    return 0;
}
