#include "parallel.h"
#include "random.h"

typedef struct {
    float *out;
    int64_t count;
    uint64_t seed;
    uint32_t stream;
} Fill;

#define DEFINE(KIND)                                                                                                 \
    VECTORISED static void fill_with_##KIND(void *context, int64_t chunk)                                            \
    {                                                                                                                \
        const Fill *fill = context;                                                                                  \
        int64_t start = chunk * CHUNK, stop = start + CHUNK < fill->count ? start + CHUNK : fill->count;             \
        Lanes lanes __attribute__((aligned(64)));                                                                    \
        lanes_start(&lanes, fill->seed, fill->stream, (uint64_t)chunk);                                              \
        float block[BLOCK] __attribute__((aligned(64)));                                                             \
        for (int64_t at = start; at < stop; at += BLOCK) {                                                           \
            int64_t size = stop - at < BLOCK ? stop - at : BLOCK;                                                    \
            lanes_##KIND(&lanes, block);                                                                             \
            memcpy(fill->out + at, block, (size_t)size * sizeof(float));                                             \
        }                                                                                                            \
    }

DEFINE(normals)
DEFINE(uniforms)
DEFINE(cauchys)
DEFINE(signs)

/* `count` standard numbers of a stream into `out`; the kinds in the order of native.KINDS. */
void slimbayes_noise(float *out, int64_t count, int kind, uint64_t seed, uint32_t stream, int threads)
{
    static const Task tasks[] = {fill_with_normals, fill_with_uniforms, fill_with_cauchys, fill_with_signs};
    Fill fill = {out, count, seed, stream};
    in_parallel(tasks[kind], &fill, (count + CHUNK - 1) / CHUNK, threads);
}
