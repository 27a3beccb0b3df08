/* Work shared among the threads that torch has already: its own OpenMP pool, whose entry point Python hands over.
   A second pool would wait in a loop on the cores that torch's products need. */

#ifndef SLIMBAYES_PARALLEL_H
#define SLIMBAYES_PARALLEL_H

#include <stdint.h>

typedef void (*Task)(void *context, int64_t part);

/* Do task(context, part) for every part in [0, parts), in any order, with at most `threads` threads. */
void in_parallel(Task task, void *context, int64_t parts, int threads);

#endif
