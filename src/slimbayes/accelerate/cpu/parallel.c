#include "parallel.h"

typedef void (*Parallel)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

static Parallel gomp_parallel = 0;

/* GOMP_parallel of the OpenMP library that torch uses, or null for one thread. */
void slimbayes_use_threads(void *entry) { gomp_parallel = (Parallel)entry; }

typedef struct {
    Task task;
    void *context;
    int64_t parts, next;
} Share;

static void take_parts(void *data)
{
    Share *share = data;
    for (;;) {
        int64_t part = __atomic_fetch_add(&share->next, 1, __ATOMIC_RELAXED);
        if (part >= share->parts)
            return;
        share->task(share->context, part);
    }
}

void in_parallel(Task task, void *context, int64_t parts, int threads)
{
    Share share = {task, context, parts, 0};
    if (threads > parts)
        threads = (int)parts;
    if (threads > 1 && gomp_parallel)
        gomp_parallel(take_parts, &share, (unsigned)threads, 0);
    else
        take_parts(&share);
}
