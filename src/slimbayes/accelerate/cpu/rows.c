/* Factors on rows: out = x * f + b, f = loc + sigma * noise made in registers, and the gradients in one sweep.

   A factor has `components` x `lines` lines of `channels` numbers; line l of component k scales `rows` rows, each of
   `inner` positions. Its noise is cut by channels into tiles of at most TILE and by lines into blocks of as many as a
   chunk of the generator holds: number (line, channel) of a tile of width w is number line * w + channel of the chunk
   (component, block, tile), see slimbayes_factor. It does not depend on the rows, so that a backward pass, or a layer
   that is used twice on other rows, makes the same numbers again. */

#include "parallel.h"
#include "random.h"
#include "scales.h"

#define TILE BLOCK
#define PIECE 32768 /* elements of one part of a sweep: work for one thread, its sums in one slot */
#define WIDE 512    /* floats of a factor repeated side by side where a position has few channels */
#define STRIP 32    /* lanes of a sum over positions */
#define EACH _Pragma("GCC ivdep") for /* of elements that may be written over what is read at the same place */

enum { POINT, NORMAL, CAUCHY };

typedef struct {
    const float *x, *grad, *loc, *rho, *bias;
    float *out, *scale, *slots;
    float *grad_loc, *grad_rho, *grad_bias;
    int64_t components, lines, rows, inner, channels, source; /* source: rows of x, which repeat after that */
    int64_t tiles, width, block, blocks, run, runs, piece, pieces; /* how they are parted */
    uint64_t seed;
    uint32_t stream;
    int32_t kind, last, threads, sums; /* last: channels behind the positions; sums: of the gradients */
    float clip;
} Sweep;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

VECTORISED static void make_scale(const float *restrict rho, float *restrict scale, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        scale[i] = scale_of(rho[i]);
}

/* Numbers of one block of lines, from any line of it on. */
typedef struct {
    Lanes lanes;
    float ready[2 * BLOCK];
    int64_t from, until;
} Source;

INLINE void source_next(Source *s, int kind, float *out)
{
    if (kind == CAUCHY)
        lanes_cauchys(&s->lanes, out);
    else
        lanes_normals(&s->lanes, out);
}

/* Start at number `skip` of a chunk. */
INLINE void source_start(Source *s, int kind, uint64_t seed, uint32_t stream, int64_t chunk, int64_t skip)
{
    uint32_t unused[LANES];
    lanes_start(&s->lanes, seed, stream, (uint64_t)chunk);
    for (; skip >= BLOCK; skip -= BLOCK) /* a normal, too, takes one word */
        for (int k = 0; k < BLOCK; k += LANES)
            lanes_step(&s->lanes, unused);
    source_next(s, kind, s->ready);
    s->from = skip;
    s->until = BLOCK;
}

/* The next `width` numbers, at most BLOCK. */
INLINE const float *source_take(Source *s, int kind, int64_t width)
{
    if (s->until - s->from < width) {
        int64_t left = s->until - s->from;
        memmove(s->ready, s->ready + s->from, (size_t)left * sizeof(float));
        /* aligned, or not: the generator writes where it is told to */
        source_next(s, kind, s->ready + left);
        s->from = 0;
        s->until = left + BLOCK;
    }
    const float *taken = s->ready + s->from;
    s->from += width;
    return taken;
}

/* f = loc + scale * noise of one line, within the clip. */
INLINE void make_factor(float *restrict f, const float *restrict loc, const float *restrict scale,
                        const float *restrict noise, float clip, int64_t width, int kind)
{
    for (int64_t c = 0; c < width; c++) {
        float value = kind == POINT ? loc[c] : loc[c] + scale[c] * noise[c];
        value = value > clip ? clip : value;
        f[c] = value < -clip ? -clip : value;
    }
}

/* Add a line's sums over positions to the part's: of loc t, of scale t * noise, nothing where it was clipped. */
INLINE void add_line(float *restrict sums, const float *restrict t, const float *restrict loc,
                     const float *restrict scale, const float *restrict noise, float clip, int64_t width, int kind)
{
    float *restrict of_loc = sums, *restrict of_scale = sums + width;
    for (int64_t c = 0; c < width; c++) {
        float value = kind == POINT ? loc[c] : loc[c] + scale[c] * noise[c];
        float own = __builtin_fabsf(value) <= clip ? t[c] : 0.0f;
        of_loc[c] += own;
        if (kind != POINT)
            of_scale[c] += own * noise[c];
    }
}

/* Where the channels of a position lie together: positions [0, count) of `stride` floats each. */
INLINE void scale_last(float *out, const float *x, const float *restrict f, const float *restrict b, int64_t count,
                       int64_t stride, int64_t width)
{
    for (int64_t p = 0; p < count; p++, x += stride, out += stride) {
        if (b)
            EACH (int64_t c = 0; c < width; c++)
                out[c] = x[c] * f[c] + b[c];
        else
            EACH (int64_t c = 0; c < width; c++)
                out[c] = x[c] * f[c];
    }
}

/* `writes` is a constant. Four positions at a time: the sums are then read and written once for four. */
INLINE void both_last(float *out, const float *g, const float *x, const float *restrict f, float *restrict t,
                      int64_t count, int64_t stride, int64_t width, int writes)
{
    int64_t p = 0;
    for (; p + 4 <= count; p += 4, x += 4 * stride, g += 4 * stride) {
        const float *x1 = x + stride, *x2 = x1 + stride, *x3 = x2 + stride;
        const float *g1 = g + stride, *g2 = g1 + stride, *g3 = g2 + stride;
        EACH (int64_t c = 0; c < width; c++) {
            float a = g[c], b = g1[c], d = g2[c], e = g3[c];
            t[c] += (a * x[c] + b * x1[c]) + (d * x2[c] + e * x3[c]);
            if (writes) {
                out[c] = a * f[c];
                out[c + stride] = b * f[c];
                out[c + 2 * stride] = d * f[c];
                out[c + 3 * stride] = e * f[c];
            }
        }
        if (writes)
            out += 4 * stride;
    }
    for (; p < count; p++, x += stride, g += stride) {
        EACH (int64_t c = 0; c < width; c++) {
            float own = g[c];
            t[c] += own * x[c];
            if (writes)
                out[c] = own * f[c];
        }
        if (writes)
            out += stride;
    }
}

INLINE void add_last(const float *restrict g, float *restrict sums, int64_t count, int64_t stride, int64_t width)
{
    for (int64_t p = 0; p < count; p++, g += stride)
        for (int64_t c = 0; c < width; c++)
            sums[c] += g[c];
}

/* Everything for a line that has one position. */
INLINE void one_last(float *out, const float *g, const float *x, const float *restrict loc,
                     const float *restrict scale, const float *restrict noise, float *restrict of_loc,
                     float *restrict of_scale, float *restrict of_bias, float clip, int64_t width, int kind,
                     int writes, int adds)
{
    EACH (int64_t c = 0; c < width; c++) {
        float value = kind == POINT ? loc[c] : loc[c] + scale[c] * noise[c], own = g[c], t = own * x[c];
        float within = value > clip ? clip : value;
        within = within < -clip ? -clip : within;
        t = __builtin_fabsf(value) <= clip ? t : 0.0f;
        of_loc[c] += t;
        if (kind != POINT)
            of_scale[c] += t * noise[c];
        if (adds)
            of_bias[c] += own;
        if (writes)
            out[c] = own * within;
    }
}

INLINE void one_forward(float *out, const float *x, const float *restrict loc, const float *restrict scale,
                        const float *restrict noise, const float *restrict b, float clip, int64_t width, int kind,
                        int adds)
{
    EACH (int64_t c = 0; c < width; c++) {
        float value = kind == POINT ? loc[c] : loc[c] + scale[c] * noise[c];
        value = value > clip ? clip : value;
        value = value < -clip ? -clip : value;
        out[c] = adds ? x[c] * value + b[c] : x[c] * value;
    }
}

/* Where the positions of a channel lie together. */
INLINE void scale_first(float *out, const float *x, const float *restrict f, const float *restrict b, int64_t inner,
                        int64_t width)
{
    for (int64_t c = 0; c < width; c++, x += inner, out += inner) {
        float factor = f[c], shift = b ? b[c] : 0.0f;
        if (b)
            EACH (int64_t p = 0; p < inner; p++)
                out[p] = x[p] * factor + shift;
        else
            EACH (int64_t p = 0; p < inner; p++)
                out[p] = x[p] * factor;
    }
}

INLINE float total_of(const float *restrict strip)
{
    float total = 0.0f;
    for (int i = 0; i < STRIP; i++)
        total += strip[i];
    return total;
}

/* One channel; `writes` and `adds` are constants. */
INLINE void channel_of(float *out, const float *g, const float *x, float factor, float *restrict t,
                       float *restrict of_bias, int64_t inner, int writes, int adds)
{
    float products[STRIP] = {0}, plain[STRIP] = {0};
    int64_t p = 0;
    for (; p + STRIP <= inner; p += STRIP)
        EACH (int i = 0; i < STRIP; i++) {
            float own = g[p + i];
            products[i] += own * x[p + i];
            if (adds)
                plain[i] += own;
            if (writes)
                out[p + i] = own * factor;
        }
    for (int i = 0; p < inner; p++, i++) {
        float own = g[p];
        products[i] += own * x[p];
        plain[i] += own;
        if (writes)
            out[p] = own * factor;
    }
    *t += total_of(products);
    if (adds)
        *of_bias += total_of(plain);
}

INLINE void both_first(float *out, const float *g, const float *x, const float *restrict f, float *restrict t,
                       float *restrict of_bias, int64_t inner, int64_t width)
{
    for (int64_t c = 0; c < width; c++, x += inner, g += inner) {
        if (out && of_bias)
            channel_of(out + c * inner, g, x, f[c], t + c, of_bias + c, inner, 1, 1);
        else if (out)
            channel_of(out + c * inner, g, x, f[c], t + c, 0, inner, 1, 0);
        else if (of_bias)
            channel_of(0, g, x, f[c], t + c, of_bias + c, inner, 0, 1);
        else
            channel_of(0, g, x, f[c], t + c, 0, inner, 0, 0);
    }
}

/* One line on its rows; with few channels the factor is repeated, so that inner loops are long. */
INLINE void line_of(const Sweep *s, const float *f, float *t, float *of_bias, const float *bias, int64_t row,
                    int64_t count, int64_t start, int64_t width)
{
    int64_t size = s->inner * s->channels, offset = s->last ? start : start * s->inner;
    const float *x = s->x + (row % s->source) * size + offset, *g = s->grad;
    float *out = s->out ? s->out + row * size + offset : 0;
    if (g)
        g += row * size + offset;
    if (!s->last) {
        for (int64_t r = 0; r < count; r++, x += size) {
            if (g) {
                both_first(out, g, x, f, t, of_bias, s->inner, width);
                g += size;
            } else {
                scale_first(out, x, f, bias, s->inner, width);
            }
            if (out)
                out += size;
        }
        return;
    }
    int64_t positions = count * s->inner, repeats = WIDE / width;
    if (s->tiles == 1 && repeats > 1 && positions >= 2 * repeats) {
        float wide[WIDE], shifts[WIDE], totals[WIDE] = {0}, plain[WIDE] = {0};
        int64_t whole = repeats * width, groups = positions / repeats;
        for (int64_t i = 0; i < repeats; i++) {
            memcpy(wide + i * width, f, (size_t)width * sizeof(float));
            if (bias)
                memcpy(shifts + i * width, bias, (size_t)width * sizeof(float));
        }
        if (g) {
            if (of_bias) /* first: out may be written over g */
                add_last(g, plain, groups, whole, whole);
            if (out)
                both_last(out, g, x, wide, totals, groups, whole, whole, 1);
            else
                both_last(0, g, x, wide, totals, groups, whole, whole, 0);
            g += groups * whole;
            for (int64_t i = 0; i < whole; i++)
                t[i % width] += totals[i];
            if (of_bias)
                for (int64_t i = 0; i < whole; i++)
                    of_bias[i % width] += plain[i];
        } else {
            scale_last(out, x, wide, bias ? shifts : 0, groups, whole, whole);
        }
        x += groups * whole;
        if (out)
            out += groups * whole;
        positions -= groups * repeats;
    }
    if (g && of_bias) /* first: out may be written over g */
        add_last(g, of_bias, positions, s->channels, width);
    if (g && out)
        both_last(out, g, x, f, t, positions, s->channels, width, 1);
    else if (g)
        both_last(0, g, x, f, t, positions, s->channels, width, 0);
    if (!g)
        scale_last(out, x, f, bias, positions, s->channels, width);
}

/* One line that has one row of one position. */
INLINE void line_alone(const Sweep *s, const float *loc, const float *scale, const float *noise, const float *bias,
                       float *sums, float *of_bias, int64_t row, int64_t start, int64_t width, int kind)
{
    const float *x = s->x + (row % s->source) * s->channels + start;
    float *out = s->out ? s->out + row * s->channels + start : 0;
    float clip = s->clip, *of_scale = sums ? sums + width : 0;
    if (!s->grad) {
        if (bias)
            one_forward(out, x, loc, scale, noise, bias, clip, width, kind, 1);
        else
            one_forward(out, x, loc, scale, noise, 0, clip, width, kind, 0);
        return;
    }
    const float *g = s->grad + row * s->channels + start;
    if (out && of_bias)
        one_last(out, g, x, loc, scale, noise, sums, of_scale, of_bias, clip, width, kind, 1, 1);
    else if (out)
        one_last(out, g, x, loc, scale, noise, sums, of_scale, 0, clip, width, kind, 1, 0);
    else if (of_bias)
        one_last(0, g, x, loc, scale, noise, sums, of_scale, of_bias, clip, width, kind, 0, 1);
    else
        one_last(0, g, x, loc, scale, noise, sums, of_scale, 0, clip, width, kind, 0, 0);
}

/* One part: some lines of a component, or some rows of one line, in one tile of channels. */
INLINE void sweep_part(const Sweep *s, int64_t part, int kind)
{
    int64_t piece = part % s->pieces, rest = part / s->pieces;
    int64_t run = rest % s->runs, tile = rest / s->runs % s->tiles, k = rest / s->runs / s->tiles;
    int64_t start = tile * s->width, width = least(s->width, s->channels - start);
    int64_t row = piece * s->piece, count = least(s->piece, s->rows - row);
    int64_t at = k * s->channels + start;
    const float *loc = s->loc + at, *scale = s->scale ? s->scale + at : 0, *bias = s->bias ? s->bias + at : 0;
    /* A run is a number of blocks, or a share of one that ends where the block does. */
    int64_t per_block = s->run < s->block ? (s->block + s->run - 1) / s->run : 1, first, last;
    if (per_block > 1) {
        first = run / per_block * s->block + run % per_block * s->run;
        last = least(first + s->run, (run / per_block + 1) * s->block);
    } else {
        first = run * s->run;
        last = first + s->run;
    }
    last = least(last, s->lines);
    float factor[TILE] __attribute__((aligned(64))), totals[TILE] __attribute__((aligned(64)));
    float *sums = s->sums ? s->slots + part * 3 * s->width : 0;
    if (sums)
        memset(sums, 0, (size_t)(3 * s->width) * sizeof(float));
    Source source __attribute__((aligned(64)));
    const float *noise = 0;
    if (kind == POINT)
        make_factor(factor, loc, scale, 0, s->clip, width, POINT);
    for (int64_t line = first; line < last; line++) {
        if (kind != POINT) {
            int64_t block = line / s->block;
            if (line == first || line % s->block == 0)
                source_start(&source, kind, s->seed, s->stream, (k * s->blocks + block) * s->tiles + tile,
                             line % s->block * width);
            noise = source_take(&source, kind, width);
        }
        int64_t place = (k * s->lines + line) * s->rows + row;
        float *of_bias = s->grad_bias ? sums + 2 * width : 0;
        if (s->last && count * s->inner == 1) {
            line_alone(s, loc, scale, noise, bias, sums, of_bias, place, start, width, kind);
            continue;
        }
        if (sums)
            memset(totals, 0, (size_t)width * sizeof(float));
        if (kind != POINT)
            make_factor(factor, loc, scale, noise, s->clip, width, kind);
        line_of(s, factor, totals, of_bias, bias, place, count, start, width);
        if (sums)
            add_line(sums, totals, loc, scale, noise, s->clip, width, kind);
    }
}

#define DEFINE(KIND)                                                                                                 \
    VECTORISED static void sweep_##KIND(void *context, int64_t part) { sweep_part(context, part, KIND); }

DEFINE(POINT)
DEFINE(NORMAL)
DEFINE(CAUCHY)

/* Add up the slots of one component and tile, in their order. */
VECTORISED static void sum_parts(void *context, int64_t which)
{
    const Sweep *s = context;
    int64_t each = s->runs * s->pieces, tile = which % s->tiles, k = which / s->tiles;
    int64_t start = tile * s->width, width = least(s->width, s->channels - start), at = k * s->channels + start;
    float sums[3 * TILE] = {0};
    for (int64_t part = which * each; part < (which + 1) * each; part++) {
        const float *slot = s->slots + part * 3 * s->width;
        for (int64_t c = 0; c < 3 * width; c++)
            sums[c] += slot[c];
    }
    for (int64_t c = 0; c < width; c++) {
        if (s->grad_loc)
            s->grad_loc[at + c] = sums[c];
        if (s->grad_rho)
            s->grad_rho[at + c] = sums[width + c] * sigmoid_of(s->rho[at + c]);
        if (s->grad_bias)
            s->grad_bias[at + c] = sums[2 * width + c];
    }
}

/* Part the work; the numbers depend on the shapes alone. Returns how many floats of slots a backward sweep needs. */
static int64_t plan(Sweep *s)
{
    s->tiles = s->channels > 0 ? (s->channels + TILE - 1) / TILE : 1;
    s->width = s->channels > 0 ? (s->channels + s->tiles - 1) / s->tiles : 1;
    s->block = CHUNK / s->width;
    s->blocks = (s->lines + s->block - 1) / s->block;
    int64_t of_line = s->width * s->inner * s->rows, wanted = of_line ? PIECE / of_line : 1;
    s->piece = s->rows;
    s->pieces = 1;
    if (wanted >= s->block) {
        s->run = wanted / s->block * s->block;
        s->runs = (s->lines + s->run - 1) / s->run;
    } else {
        s->run = wanted > 0 ? wanted : 1;
        s->runs = s->blocks * ((s->block + s->run - 1) / s->run);
        if (s->blocks == 1)
            s->runs = (s->lines + s->run - 1) / s->run;
        if (wanted == 0) {
            int64_t most = PIECE / (s->width * s->inner);
            s->piece = most > 0 ? most : 1;
            s->pieces = (s->rows + s->piece - 1) / s->piece;
        }
    }
    return s->components * s->tiles * s->runs * s->pieces * 3 * s->width;
}

void slimbayes_sweep_slots(int64_t *slots, int64_t components, int64_t lines, int64_t rows, int64_t inner,
                           int64_t channels)
{
    Sweep s = {.components = components, .lines = lines, .rows = rows, .inner = inner, .channels = channels};
    *slots = plan(&s);
}

/* out = x * f + bias without `grad`; with it out = grad * f (unless null), the sums over rows grad * x of loc and of
   scale, times the slope of the softplus, and of grad for the bias. `scale` is room for a [components, channels]
   array, `slots` for what slimbayes_sweep_slots says. `rho` is null for a point. */
void slimbayes_sweep(const float *x, const float *grad, float *out, const float *loc, const float *rho,
                     const float *bias, float *grad_loc, float *grad_rho, float *grad_bias, float *scale,
                     float *slots, int64_t components, int64_t lines, int64_t rows, int64_t inner,
                     int64_t channels, int64_t source, int last, int kind, float clip, uint64_t seed,
                     uint32_t stream, int threads)
{
    static const Task tasks[] = {sweep_POINT, sweep_NORMAL, sweep_CAUCHY};
    Sweep s = {.x = x, .grad = grad, .out = out, .loc = loc, .rho = rho, .bias = bias, .grad_loc = grad_loc,
               .grad_rho = grad_rho, .grad_bias = grad_bias, .scale = scale, .slots = slots,
               .components = components, .lines = lines, .rows = rows, .inner = inner, .channels = channels,
               .source = source, .seed = seed, .stream = stream, .kind = kind, .last = last,
               .threads = threads, .clip = clip};
    s.sums = grad_loc || grad_rho || grad_bias;
    plan(&s);
    if (kind != POINT)
        make_scale(rho, scale, components * channels);
    in_parallel(tasks[kind], &s, components * s.tiles * s.runs * s.pieces, threads);
    if (s.sums)
        in_parallel(sum_parts, &s, components * s.tiles, threads);
}

/* The noise of a factor, [components, lines, channels], as the sweeps make it. */
typedef struct {
    Sweep *sweep;
    float *noise;
} Fill;

VECTORISED static void fill_block(void *context, int64_t which)
{
    const Fill *fill = context;
    const Sweep *s = fill->sweep;
    int64_t tile = which % s->tiles, block = which / s->tiles % s->blocks, k = which / s->tiles / s->blocks;
    int64_t start = tile * s->width, width = least(s->width, s->channels - start);
    Source source __attribute__((aligned(64)));
    int64_t first = block * s->block, last = least(first + s->block, s->lines);
    source_start(&source, s->kind, s->seed, s->stream, which, 0);
    for (int64_t line = first; line < last; line++) {
        const float *noise = s->kind == CAUCHY ? source_take(&source, CAUCHY, width) : source_take(&source, NORMAL, width);
        memcpy(fill->noise + (k * s->lines + line) * s->channels + start, noise, (size_t)width * sizeof(float));
    }
}

void slimbayes_factor(float *noise, int64_t components, int64_t lines, int64_t channels, int kind, uint64_t seed,
                      uint32_t stream, int threads)
{
    Sweep s = {.components = components, .lines = lines, .rows = 1, .inner = 1, .channels = channels, .kind = kind,
               .seed = seed, .stream = stream};
    plan(&s);
    Fill fill = {&s, noise};
    in_parallel(fill_block, &fill, components * s.blocks * s.tiles, threads);
}
