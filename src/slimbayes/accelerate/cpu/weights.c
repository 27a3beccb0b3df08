/* Samples of random weights, M + sigma * e, with the sums of their KL, and their gradients; one call for a network.

   sigma = softplus(rho) + 1e-7, or the product of exp(log U) and the transpose of exp(log V). The noise e is made where it
   is used, and made again for the gradients. Work is cut by the sizes of the tensors alone and every part has sums of
   its own, which are added in order: the number of threads changes no result. */

#include <stdlib.h>

#include "parallel.h"
#include "random.h"

#define EPSILON 1e-7f
#define HELD 8   /* draws whose generators run side by side; with more, each goes over a whole chunk alone */
#define PARTS 64 /* of one tensor at most: every part of a k-tied one has a sum for each column */
#define WIDTH 16

typedef float Floats __attribute__((vector_size(4 * WIDTH)));

/* One random tensor, in words of 64 bits as weights.py packs them. Rank 0: `first` is rho. Else `first` and `second` are
   log U [rows, rank] and log V [columns, rank]. What is null is not wanted, but a null gradient is one of zeros. */
typedef struct {
    const float *mean, *first, *second;
    float *made;       /* [draws, rows, columns] */
    const float *grad; /* of the same shape */
    float *d_mean, *d_first, *d_second;
    int64_t rows, columns, rank;
    int64_t stream;  /* of the first draw; the others follow */
    int64_t centred; /* without the mean */
    double centre;   /* of the prior */
    /* The KL pulls at M with mean_pull (M - centre) and at sigma with pull sigma - factor / sigma. */
    double mean_pull, pull, factor;
} Random;

/* A tensor and its room: U, V transposed, and of each part its sums and the gradients of its rows and columns. */
typedef struct {
    const Random *it;
    int64_t size, length, parts; /* numbers in all, in a part, and parts */
    int64_t before;              /* parts of the tensors before this one */
    int64_t reach;               /* rows that a part can touch */
    float *u, *v, *by_row, *by_column;
} Piece;

typedef struct {
    const Piece *pieces;
    int64_t count, draws;
    uint64_t seed;
    double *sums; /* [parts, 3]: of (M - centre)^2, of sigma^2 and of log sigma; or null */
} Job;

/* exp x to a unit in the last place; it overflows and underflows where it should. */
INLINE float exp_of(float x)
{
    x = x < -110.0f ? -110.0f : x;
    x = x > 90.0f ? 90.0f : x;
    float shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the sum is rounded to an integer */
    int32_t n;
    memcpy(&n, &shifted, 4);
    n -= 0x4b400000;
    float whole = shifted - 12582912.0f;
    float t = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float p = 1.390131144e-03f;
    p = p * t + 8.363200062e-03f;
    p = p * t + 4.166685407e-02f;
    p = p * t + 1.666657696e-01f;
    p = p * t + 4.999999955e-01f;
    p = (p * (t * t) + t) + 1.0f;
    int32_t half = n >> 1; /* 2^n in two factors, each of which is a float */
    uint32_t a = (uint32_t)(half + 127) << 23, b = (uint32_t)(n - half + 127) << 23;
    float first, second;
    memcpy(&first, &a, 4);
    memcpy(&second, &b, 4);
    return p * first * second;
}

/* log(1 + z) for z in [0, 1], relative error 5e-9 before rounding. */
INLINE float log1p_of(float z)
{
    float p = -3.244025860e-03f;
    p = p * z + 1.985146545e-02f;
    p = p * z - 5.695954006e-02f;
    p = p * z + 1.060365547e-01f;
    p = p * z - 1.530559292e-01f;
    p = p * z + 1.967593938e-01f;
    p = p * z - 2.495413368e-01f;
    p = p * z + 3.332996242e-01f;
    p = p * z - 4.999990242e-01f;
    p = p * z + 9.999999953e-01f;
    return p * z;
}

INLINE float scale_from(float rho, float z) { return (log1p_of(z) + (rho > 0.0f ? rho : 0.0f)) + EPSILON; }

/* log x for any float. */
INLINE float any_log_of(float x)
{
    if (x >= 0x1p-126f && x <= 0x1.fffffep127f)
        return log_of(x);
    if (x > 0.0f && x < 1.0f)
        return log_of(x * 0x1p24f) - 24.0f * 0.693147180559945f;
    return x == 0.0f ? -__builtin_inff() : x > 0.0f ? x : __builtin_nanf("");
}

INLINE const Piece *piece_of(const Job *job, int64_t part)
{
    const Piece *piece = job->pieces;
    while (part >= piece->before + piece->parts)
        piece++;
    return piece;
}

/* sigma of the elements from `start` on. */
INLINE void scales(const Piece *piece, int64_t start, int64_t size, float *restrict out)
{
    const Random *it = piece->it;
    if (it->rank == 0) {
        const float *rho = it->first + start;
        for (int64_t i = 0; i < size; i++)
            out[i] = scale_from(rho[i], exp_of(-__builtin_fabsf(rho[i])));
        return;
    }
    int64_t columns = it->columns, rank = it->rank;
    int64_t row = start / columns, column = start - row * columns;
    for (int64_t done = 0; done < size; row++, column = 0) {
        int64_t length = columns - column < size - done ? columns - column : size - done;
        const float *u = piece->u + row * rank, *v = piece->v + column;
        float *to = out + done;
        if (rank == 1) {
            for (int64_t j = 0; j < length; j++)
                to[j] = u[0] * v[j];
        } else if (rank == 2) {
            const float *v1 = v + columns;
            float a = u[0], b = u[1];
            for (int64_t j = 0; j < length; j++)
                to[j] = a * v[j] + b * v1[j];
        } else {
            const float *v1 = v + columns, *v2 = v1 + columns;
            float a = u[0], b = u[1], c = u[2];
            for (int64_t j = 0; j < length; j++)
                to[j] = (a * v[j] + b * v1[j]) + c * v2[j];
            for (int64_t k = 3; k < rank; k++) {
                const float *more = v + k * columns;
                float d = u[k];
                for (int64_t j = 0; j < length; j++)
                    to[j] += d * more[j];
            }
        }
        done += length;
    }
}

/* Add the sum of (x - centre)^2 over at most BLOCK numbers. */
INLINE void add_squares(const float *x, float centre, int64_t size, double *restrict total)
{
    Floats sums[4] = {{0}};
    int64_t i = 0;
    for (; i + 4 * WIDTH <= size; i += 4 * WIDTH)
        for (int k = 0; k < 4; k++) {
            Floats one;
            memcpy(&one, x + i + k * WIDTH, sizeof one);
            one = one - centre;
            sums[k] += one * one;
        }
    Floats all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    double found = 0.0;
    for (int k = 0; k < WIDTH; k++)
        found += (double)all[k];
    for (; i < size; i++)
        found += (double)(x[i] - centre) * (double)(x[i] - centre);
    *total += found;
}

/* Add the sum of log x over at most BLOCK positive numbers: exponents are added, the rest of 16 numbers multiplied. */
INLINE void add_logs(const float *restrict x, int64_t size, double *restrict total)
{
    uint32_t low[LANES], high[LANES];
    int32_t exponents[LANES];
    float products[LANES];
    for (int k = 0; k < LANES; k++) {
        low[k] = high[k] = 0x3f800000u;
        exponents[k] = 0;
        products[k] = 1.0f;
    }
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int k = 0; k < LANES; k++) {
            uint32_t bits, rest;
            memcpy(&bits, x + i + k, 4);
            low[k] = bits < low[k] ? bits : low[k];
            high[k] = bits > high[k] ? bits : high[k];
            exponents[k] += (int32_t)(bits >> 23) - 127;
            rest = (bits & 0x007fffffu) | 0x3f800000u;
            float one;
            memcpy(&one, &rest, 4);
            products[k] *= one;
        }
    uint32_t least = low[0], most = high[0];
    int32_t exponent = exponents[0];
    for (int k = 1; k < LANES; k++) {
        least = low[k] < least ? low[k] : least;
        most = high[k] > most ? high[k] : most;
        exponent += exponents[k];
    }
    double found = 0.0;
    if (least >= 0x00800000u && most < 0x7f800000u) {
        for (int k = 0; k < LANES; k++)
            products[k] = log_of(products[k]);
        float sums[WIDTH];
        for (int k = 0; k < WIDTH; k++)
            sums[k] = (products[k] + products[k + 16]) + (products[k + 32] + products[k + 48]);
        for (int k = 0; k < WIDTH; k++)
            found += (double)sums[k];
        found += 0.693147180559945309 * exponent;
    } else { /* a zero, a number with fewer digits, an infinity or none at all */
        i = 0;
    }
    for (; i < size; i++)
        found += (double)any_log_of(x[i]);
    *total += found;
}

VECTORISED static void sample_part(void *context, int64_t part)
{
    const Job *job = context;
    const Piece *piece = piece_of(job, part);
    const Random *it = piece->it;
    int64_t first = (part - piece->before) * piece->length;
    int64_t last = first + piece->length < piece->size ? first + piece->length : piece->size;
    int held = job->draws <= HELD;
    double *sums = job->sums ? job->sums + 3 * part : 0;
    Lanes lanes[HELD] __attribute__((aligned(64)));
    float sigma[CHUNK] __attribute__((aligned(64))), noise[BLOCK] __attribute__((aligned(64)));
    for (int64_t start = first; start < last; start += CHUNK) {
        int64_t stop = start + CHUNK < last ? start + CHUNK : last, chunk = start / CHUNK;
        for (int64_t draw = 0; held && draw < job->draws; draw++)
            lanes_start(&lanes[draw], job->seed, (uint32_t)(it->stream + draw), (uint64_t)chunk);
        int64_t span = held ? BLOCK : CHUNK;
        for (int64_t at = start; at < stop; at += span) {
            int64_t end = at + span < stop ? at + span : stop;
            for (int64_t block = at; block < end; block += BLOCK) {
                int64_t size = end - block < BLOCK ? end - block : BLOCK;
                scales(piece, block, size, sigma + (block - at));
                if (sums) {
                    add_squares(it->mean + block, (float)it->centre, size, sums);
                    add_squares(sigma + (block - at), 0.0f, size, sums + 1);
                    add_logs(sigma + (block - at), size, sums + 2);
                }
            }
            for (int64_t draw = 0; draw < job->draws; draw++) {
                Lanes *own = &lanes[held ? draw : 0];
                if (!held)
                    lanes_start(own, job->seed, (uint32_t)(it->stream + draw), (uint64_t)chunk);
                for (int64_t block = at; block < end; block += BLOCK) {
                    int64_t size = end - block < BLOCK ? end - block : BLOCK;
                    lanes_normals(own, noise);
                    const float *mean = it->mean + block, *scale = sigma + (block - at);
                    float *out = it->made + draw * piece->size + block;
                    if (it->centred)
                        for (int64_t i = 0; i < size; i++)
                            out[i] = scale[i] * noise[i];
                    else
                        for (int64_t i = 0; i < size; i++)
                            out[i] = mean[i] + scale[i] * noise[i];
                }
            }
        }
    }
}

/* The slope of sigma in those of the rows and columns of a k-tied tensor. */
INLINE void add_slopes(const Piece *piece, int64_t start, int64_t size, const float *restrict slope,
                       float *restrict by_row, float *restrict by_column)
{
    int64_t columns = piece->it->columns, rank = piece->it->rank;
    int64_t row = start / columns, column = start - row * columns;
    for (int64_t done = 0; done < size; row++, column = 0, by_row += rank) {
        int64_t length = columns - column < size - done ? columns - column : size - done;
        const float *u = piece->u + row * rank, *from = slope + done;
        for (int64_t k = 0; k < rank; k++) {
            const float *v = piece->v + k * columns + column;
            float *to = by_column + k * columns + column, own = u[k];
            Floats sums[2] = {{0}};
            int64_t j = 0;
            for (; j + 2 * WIDTH <= length; j += 2 * WIDTH)
                for (int part = 0; part < 2; part++) {
                    Floats s, factor, sum;
                    memcpy(&s, from + j + part * WIDTH, sizeof s);
                    memcpy(&factor, v + j + part * WIDTH, sizeof s);
                    memcpy(&sum, to + j + part * WIDTH, sizeof s);
                    sums[part] += s * factor;
                    sum += s * own;
                    memcpy(to + j + part * WIDTH, &sum, sizeof s);
                }
            Floats all = sums[0] + sums[1];
            float total = 0.0f;
            for (int part = 0; part < WIDTH; part++)
                total += all[part];
            for (; j < length; j++) {
                total += from[j] * v[j];
                to[j] += from[j] * own;
            }
            by_row[k] += total;
        }
        done += length;
    }
}

/* What the slopes of sigma mean for rho, with the KL's own: (s + p sigma - f/sigma) sigmoid(rho), by one division. */
INLINE void rho_gradients(const float *restrict rho, const float *restrict slope, float pull, float factor,
                          int64_t size, float *restrict out)
{
    if (factor == 0.0f)
        for (int64_t i = 0; i < size; i++) {
            float z = exp_of(-__builtin_fabsf(rho[i]));
            out[i] = slope[i] * (rho[i] < 0.0f ? z : 1.0f) / (1.0f + z);
        }
    else
        for (int64_t i = 0; i < size; i++) {
            float z = exp_of(-__builtin_fabsf(rho[i])), scale = scale_from(rho[i], z);
            float own = (slope[i] + pull * scale) * scale - factor;
            out[i] = own * (rho[i] < 0.0f ? z : 1.0f) / (scale * (1.0f + z));
        }
}

VECTORISED static void gradient_part(void *context, int64_t part)
{
    const Job *job = context;
    const Piece *piece = piece_of(job, part);
    const Random *it = piece->it;
    int64_t own = part - piece->before;
    int64_t first = own * piece->length;
    int64_t last = first + piece->length < piece->size ? first + piece->length : piece->size;
    int held = job->draws <= HELD, spread = it->d_first != 0;
    float centre = (float)it->centre, mean_pull = (float)it->mean_pull;
    float pull = (float)it->pull, factor = (float)it->factor;
    float *by_row = 0, *by_column = 0;
    if (it->rank && spread) {
        by_row = piece->by_row + own * piece->reach * it->rank;
        by_column = piece->by_column + own * it->columns * it->rank;
        memset(by_row, 0, (size_t)(piece->reach * it->rank) * sizeof(float));
        memset(by_column, 0, (size_t)(it->columns * it->rank) * sizeof(float));
    }
    Lanes lanes[HELD] __attribute__((aligned(64)));
    float slope[CHUNK] __attribute__((aligned(64))), total[CHUNK] __attribute__((aligned(64)));
    float noise[BLOCK] __attribute__((aligned(64)));
    for (int64_t start = first; start < last; start += CHUNK) {
        int64_t stop = start + CHUNK < last ? start + CHUNK : last, chunk = start / CHUNK;
        int64_t draws = it->grad ? job->draws : 0;
        for (int64_t draw = 0; held && spread && draw < draws; draw++)
            lanes_start(&lanes[draw], job->seed, (uint32_t)(it->stream + draw), (uint64_t)chunk);
        int64_t span = held ? BLOCK : CHUNK;
        for (int64_t at = start; at < stop; at += span) {
            int64_t end = at + span < stop ? at + span : stop;
            if (draws == 0)
                memset(slope, 0, (size_t)(end - at) * sizeof(float));
            if (draws == 0 || it->centred)
                memset(total, 0, (size_t)(end - at) * sizeof(float));
            for (int64_t draw = 0; draw < draws; draw++) {
                Lanes *lane = &lanes[held ? draw : 0];
                if (!held && spread)
                    lanes_start(lane, job->seed, (uint32_t)(it->stream + draw), (uint64_t)chunk);
                for (int64_t block = at; block < end; block += BLOCK) {
                    int64_t size = end - block < BLOCK ? end - block : BLOCK;
                    const float *grad = it->grad + draw * piece->size + block;
                    float *one = slope + (block - at), *sum = total + (block - at);
                    if (spread) {
                        lanes_normals(lane, noise);
                        if (draw == 0)
                            for (int64_t i = 0; i < size; i++)
                                one[i] = grad[i] * noise[i];
                        else
                            for (int64_t i = 0; i < size; i++)
                                one[i] += grad[i] * noise[i];
                    }
                    if (it->centred)
                        continue;
                    if (draw == 0)
                        memcpy(sum, grad, (size_t)size * sizeof(float));
                    else
                        for (int64_t i = 0; i < size; i++)
                            sum[i] += grad[i];
                }
            }
            for (int64_t block = at; block < end; block += BLOCK) {
                int64_t size = end - block < BLOCK ? end - block : BLOCK;
                float *one = slope + (block - at), *sum = total + (block - at);
                if (it->d_mean) {
                    const float *mean = it->mean + block;
                    float *out = it->d_mean + block;
                    for (int64_t i = 0; i < size; i++)
                        out[i] = sum[i] + mean_pull * (mean[i] - centre);
                }
                if (!spread)
                    continue;
                if (it->rank == 0) {
                    rho_gradients(it->first + block, one, pull, factor, size, it->d_first + block);
                    continue;
                }
                if (factor != 0.0f) {
                    scales(piece, block, size, noise);
                    for (int64_t i = 0; i < size; i++)
                        one[i] += pull * noise[i] - factor / noise[i];
                }
                add_slopes(piece, block, size, one, by_row + (block / it->columns - first / it->columns) * it->rank,
                           by_column);
            }
        }
    }
}

/* U and V transposed. */
VECTORISED static void exponentials(const Piece *piece)
{
    const Random *it = piece->it;
    for (int64_t i = 0; i < it->rows * it->rank; i++)
        piece->u[i] = exp_of(it->first[i]);
    for (int64_t k = 0; k < it->rank; k++)
        for (int64_t j = 0; j < it->columns; j++)
            piece->v[k * it->columns + j] = exp_of(it->second[j * it->rank + k]);
}

/* The gradients of log U and log V from those of the parts. */
VECTORISED static void finish(const Piece *piece)
{
    const Random *it = piece->it;
    int64_t rank = it->rank, columns = it->columns;
    for (int64_t i = 0; i < it->rows * rank; i++)
        it->d_first[i] = 0.0f;
    for (int64_t i = 0; i < columns * rank; i++)
        it->d_second[i] = 0.0f;
    if (!piece->parts)
        return;
    for (int64_t part = 0; part < piece->parts; part++) {
        int64_t first = part * piece->length, last = first + piece->length < piece->size ? first + piece->length : piece->size;
        const float *from = piece->by_row + part * piece->reach * rank;
        float *to = it->d_first + first / columns * rank;
        int64_t count = ((last - 1) / columns - first / columns + 1) * rank;
        for (int64_t i = 0; i < count; i++)
            to[i] += from[i];
    }
    for (int64_t i = 0; i < it->rows * rank; i++)
        it->d_first[i] *= piece->u[i];
    float *sums = piece->by_column;
    for (int64_t part = 1; part < piece->parts; part++) {
        const float *from = piece->by_column + part * columns * rank;
        for (int64_t i = 0; i < columns * rank; i++)
            sums[i] += from[i];
    }
    for (int64_t k = 0; k < rank; k++)
        for (int64_t j = 0; j < columns; j++)
            it->d_second[j * rank + k] = sums[k * columns + j] * piece->v[k * columns + j];
}

/* The pieces of these tensors with all their room, as one allocation, or null. */
static Piece *cut(const Random *tensors, int64_t count, int gradients, int64_t *parts)
{
    int64_t floats = 0;
    *parts = 0;
    Piece *pieces = malloc((size_t)(count ? count : 1) * sizeof(Piece));
    if (!pieces)
        return 0;
    for (int64_t i = 0; i < count; i++) {
        const Random *it = tensors + i;
        Piece *piece = pieces + i;
        int64_t size = it->rows * it->columns, chunks = (size + CHUNK - 1) / CHUNK;
        int64_t each = (chunks + PARTS - 1) / PARTS;
        piece->it = it;
        piece->size = size;
        piece->length = each * CHUNK;
        piece->parts = each ? (chunks + each - 1) / each : 0;
        piece->before = *parts;
        piece->reach = it->columns ? piece->length / it->columns + 2 : 0;
        *parts += piece->parts;
        floats += it->rank * (it->rows + it->columns);
        if (gradients)
            floats += piece->parts * it->rank * (piece->reach + it->columns);
    }
    Piece *grown = realloc(pieces, (size_t)(count ? count : 1) * sizeof(Piece) + (size_t)floats * sizeof(float));
    if (!grown) {
        free(pieces);
        return 0;
    }
    float *room = (float *)(grown + count);
    for (int64_t i = 0; i < count; i++) {
        Piece *piece = grown + i;
        int64_t rank = tensors[i].rank;
        piece->u = room;
        piece->v = piece->u + rank * tensors[i].rows;
        piece->by_row = piece->v + rank * tensors[i].columns;
        piece->by_column = piece->by_row + (gradients ? piece->parts * rank * piece->reach : 0);
        room = piece->by_column + (gradients ? piece->parts * rank * tensors[i].columns : 0);
        if (rank)
            exponentials(piece);
    }
    return grown;
}

/* Sample `count` tensors; `sums` is [count, 3] or null. Returns 1 where memory lacks. */
int slimbayes_sample_weights(const void *tensors, int64_t count, int64_t draws, uint64_t seed, double *sums, int threads)
{
    int64_t parts;
    Piece *pieces = cut(tensors, count, 0, &parts);
    if (!pieces)
        return 1;
    double *by_part = sums ? calloc((size_t)(parts ? parts : 1) * 3, sizeof(double)) : 0;
    if (sums && !by_part) {
        free(pieces);
        return 1;
    }
    Job job = {pieces, count, draws, seed, by_part};
    in_parallel(sample_part, &job, parts, threads);
    for (int64_t i = 0; sums && i < count; i++)
        for (int k = 0; k < 3; k++) {
            sums[3 * i + k] = 0.0;
            for (int64_t part = pieces[i].before; part < pieces[i].before + pieces[i].parts; part++)
                sums[3 * i + k] += by_part[3 * part + k];
        }
    free(by_part);
    free(pieces);
    return 0;
}

/* The gradients of these samples, and of their KL times the factors that the tensors bring. */
int slimbayes_weight_gradients(const void *tensors, int64_t count, int64_t draws, uint64_t seed, int threads)
{
    int64_t parts;
    Piece *pieces = cut(tensors, count, 1, &parts);
    if (!pieces)
        return 1;
    Job job = {pieces, count, draws, seed, 0};
    in_parallel(gradient_part, &job, parts, threads);
    for (int64_t i = 0; i < count; i++)
        if (pieces[i].it->rank && (pieces[i].it->d_first || pieces[i].it->d_second)) /* one may be empty */
            finish(pieces + i);
    free(pieces);
    return 0;
}
