/* A step of an LSTM and its gradients: everything but the products of matrices, in one sweep over the rows.

   z = r_in * input + r * product + offset holds i, f, g, o one after another; c' = sigmoid(f) c + sigmoid(i) tanh(g) and
   h' = sigmoid(o) tanh(c'). The next product wants s * h'. */

#include "parallel.h"
#include "random.h"
#include "scales.h"

#define TILE 256 /* units of a row that are gone through together: their gates stay in the first cache */
#define EACH _Pragma("GCC ivdep") for /* a cell may be written over the one before */

/* What stays the same from step to step. Null for what there is not; line row / alike of a factor is for that row. */
typedef struct {
    const float *input, *product, *r_in, *r, *offset, *s, *first_c;
    float *gates, *cells, *out, *scaled;
    int64_t rows, size;
    int64_t alike_r_in, alike_r, alike_offset, alike_s;
    int64_t product_step, gates_step, cells_step, out_step; /* numbers between two steps */
} Forward;

typedef struct {
    const float *gates, *cells, *first_c, *out, *grad_out, *grad_c, *down, *products, *inputs, *r_in, *r, *s;
    float *carry, *inner, *outer, *of_r_in, *of_r, *of_s, *of_offset;
    int64_t rows, size, grad_step, grad_row, grad_c_step, grad_c_row;
} Backward;

typedef struct {
    const float *x, *s;
    float *out;
    int64_t rows, given, size, x_step, x_row, alike;
} Inputs;

typedef struct {
    const void *plan;
    int64_t step, before, place, run;
} Step;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Fractions, as divisions take longest: up / down with down in [1, 2]. */
typedef struct {
    float up, down;
} Fraction;

INLINE Fraction sigmoid_parts(float x)
{
    float e = exp_of(-__builtin_fabsf(x));
    return (Fraction){x >= 0.0f ? 1.0f : e, 1.0f + e};
}

/* exp(-2|x|) - 1 = m gives tanh |x| = -m / (2 + m), with all digits near 0. */
INLINE Fraction tanh_parts(float x)
{
    float y = -2.0f * __builtin_fabsf(x);
    Exponential e = exp_parts(y < -40.0f ? -40.0f : y);
    float m = e.rest * e.power + (e.power - 1.0f);
    return (Fraction){__builtin_copysignf(m, x), 2.0f + m};
}

INLINE float tanh_of(float x)
{
    Fraction t = tanh_parts(x);
    return t.up / t.down;
}

INLINE void join(float *restrict z, const float *restrict x, const float *restrict r_in, const float *restrict y,
                 const float *restrict r, const float *restrict offset, int64_t count)
{
    if (r_in && r)
        for (int64_t j = 0; j < count; j++)
            z[j] = x[j] * r_in[j] + y[j] * r[j];
    else if (r_in)
        for (int64_t j = 0; j < count; j++)
            z[j] = x[j] * r_in[j] + y[j];
    else if (r)
        for (int64_t j = 0; j < count; j++)
            z[j] = x[j] + y[j] * r[j];
    else
        for (int64_t j = 0; j < count; j++)
            z[j] = x[j] + y[j];
    if (offset)
        for (int64_t j = 0; j < count; j++)
            z[j] += offset[j];
}

/* z becomes the gates. */
INLINE void gate(float (*restrict z)[TILE], const float *last_c, float *cell, float *restrict out, int64_t count)
{
    EACH (int64_t j = 0; j < count; j++) {
        float i = sigmoid_of(z[0][j]), f = sigmoid_of(z[1][j]), g = tanh_of(z[2][j]), o = sigmoid_of(z[3][j]);
        float c = f * last_c[j] + i * g;
        z[0][j] = i;
        z[1][j] = f;
        z[2][j] = g;
        z[3][j] = o;
        cell[j] = c;
        out[j] = o * tanh_of(c);
    }
}

/* The same, when nobody asks for the gates. */
INLINE void gate_only(float (*restrict z)[TILE], const float *last_c, float *cell, float *restrict out, int64_t count)
{
    EACH (int64_t j = 0; j < count; j++) {
        Fraction i = sigmoid_parts(z[0][j]), f = sigmoid_parts(z[1][j]), g = tanh_parts(z[2][j]);
        Fraction o = sigmoid_parts(z[3][j]);
        float down = i.down * g.down;
        float c = (f.up * last_c[j] * down + i.up * g.up * f.down) / (f.down * down);
        Fraction wave = tanh_parts(c);
        cell[j] = c;
        out[j] = (o.up * wave.up) / (o.down * wave.down);
    }
}

INLINE void multiply(float *restrict out, const float *restrict a, const float *restrict b, int64_t count)
{
    for (int64_t j = 0; j < count; j++)
        out[j] = a[j] * b[j];
}

INLINE void add_product(float *restrict out, const float *restrict a, const float *restrict b, int64_t count)
{
    for (int64_t j = 0; j < count; j++)
        out[j] += a[j] * b[j];
}

INLINE const float *at(const float *from, int64_t place) { return from ? from + place : 0; }

VECTORISED static void forward_rows(void *context, int64_t part)
{
    const Step *step = context;
    const Forward *p = step->plan;
    int64_t size = p->size, last = least(p->rows, (part + 1) * step->run);
    float z[4][TILE] __attribute__((aligned(64)));
    const float *last_c = step->before < 0 ? p->first_c : p->cells + step->before * p->cells_step;
    for (int64_t row = part * step->run; row < last; row++) {
        const float *x = p->input + 4 * (step->place * p->rows + row) * size;
        const float *y = p->product + step->step * p->product_step + 4 * row * size;
        const float *r_in = at(p->r_in, 4 * (row / p->alike_r_in) * size);
        const float *r = at(p->r, 4 * (row / p->alike_r) * size);
        const float *offset = at(p->offset, 4 * (row / p->alike_offset) * size);
        const float *s = at(p->s, row / p->alike_s * size);
        for (int64_t first = 0; first < size; first += TILE) {
            int64_t count = least(TILE, size - first), at_row = row * size + first;
            for (int k = 0; k < 4; k++) {
                int64_t here = k * size + first;
                join(z[k], x + here, at(r_in, here), y + here, at(r, here), at(offset, here), count);
            }
            float *out = p->out + step->step * p->out_step + at_row;
            float *cell = p->cells + step->step * p->cells_step + at_row;
            if (p->gates) {
                gate(z, last_c + at_row, cell, out, count);
                for (int k = 0; k < 4; k++)
                    memcpy(p->gates + step->step * p->gates_step + (4 * row + k) * size + first, z[k],
                           (size_t)count * sizeof(float));
            } else
                gate_only(z, last_c + at_row, cell, out, count);
            if (s)
                multiply(p->scaled + at_row, out, s + first, count);
        }
    }
}

VECTORISED static void scale_step(void *context, int64_t step)
{
    const Inputs *p = context;
    for (int64_t row = 0; row < p->rows; row++)
        multiply(p->out + (step * p->rows + row) * p->size, p->x + step * p->x_step + row % p->given * p->x_row,
                 p->s + row / p->alike * p->size, p->size);
}

/* s * x for so many steps, [steps, rows, size]; the `given` rows of x repeat, line row / alike of s is for that row. */
void slimbayes_lstm_inputs(const float *x, const float *s, float *out, int64_t steps, int64_t rows, int64_t given,
                           int64_t size, int64_t x_step, int64_t x_row, int64_t alike, int threads)
{
    Inputs inputs = {x, s, out, rows, given, size, x_step, x_row, alike};
    in_parallel(scale_step, &inputs, steps, threads);
}

/* The gradients of the gates' z, into made, and of c, into carry, from that of h' and c'. */
INLINE void ungate(float (*restrict made)[TILE], const float *restrict gates, int64_t size,
                   const float *restrict cell, const float *restrict last_c, const float *restrict grad,
                   const float *restrict down, const float *restrict grad_c, float *restrict carry, int64_t count)
{
    if (grad_c)
        for (int64_t j = 0; j < count; j++)
            carry[j] += grad_c[j];
    for (int64_t j = 0; j < count; j++) {
        float i = gates[j], f = gates[size + j], g = gates[2 * size + j], o = gates[3 * size + j];
        float wave = tanh_of(cell[j]), own = grad[j] + down[j];
        float c = carry[j] + own * o * (1.0f - wave * wave);
        made[0][j] = c * g * (i * (1.0f - i));
        made[1][j] = c * last_c[j] * (f * (1.0f - f));
        made[2][j] = c * i * (1.0f - g * g);
        made[3][j] = own * wave * (o * (1.0f - o));
        carry[j] = c * f;
    }
}

VECTORISED static void backward_rows(void *context, int64_t part)
{
    const Step *step = context;
    const Backward *p = step->plan;
    int64_t size = p->size, all = p->rows * size, last = least(p->rows, (part + 1) * step->run);
    float made[4][TILE] __attribute__((aligned(64))), down[TILE] __attribute__((aligned(64)));
    const float *last_c = step->before < 0 ? p->first_c : p->cells + step->before * all;
    for (int64_t row = part * step->run; row < last; row++)
        for (int64_t first = 0; first < size; first += TILE) {
            int64_t count = least(TILE, size - first), at_row = row * size + first, now = step->step * all;
            const float *sent = p->down + at_row;
            if (p->s) {
                add_product(p->of_s + at_row, sent, p->out + now + at_row, count);
                multiply(down, sent, p->s + at_row, count);
                sent = down;
            }
            ungate(made, p->gates + 4 * (now + row * size) + first, size, p->cells + now + at_row, last_c + at_row,
                   p->grad_out + step->step * p->grad_step + row * p->grad_row + first, sent,
                   at(p->grad_c, step->step * p->grad_c_step + row * p->grad_c_row + first), p->carry + at_row, count);
            for (int k = 0; k < 4; k++) {
                int64_t here = (4 * row + k) * size + first, kept = 4 * now + here;
                float *inner = p->inner + 4 * step->place * all + here, *outer = p->outer + 4 * step->place * all + here;
                if (p->r_in) {
                    add_product(p->of_r_in + here, made[k], p->inputs + kept, count);
                    multiply(inner, made[k], p->r_in + here, count);
                } else
                    memcpy(inner, made[k], (size_t)count * sizeof(float));
                if (p->r) {
                    add_product(p->of_r + here, made[k], p->products + kept, count);
                    multiply(outer, made[k], p->r + here, count);
                } else if (outer != inner)
                    memcpy(outer, made[k], (size_t)count * sizeof(float));
                if (p->of_offset)
                    for (int64_t j = 0; j < count; j++)
                        p->of_offset[here + j] += made[k][j];
            }
        }
}

static void by_rows(Task task, const void *plan, int64_t rows, int64_t step, int64_t before, int64_t place, int threads)
{
    int64_t run = (rows + 4 * threads - 1) / (4 * threads);
    Step given = {plan, step, before, place, run};
    if (rows)
        in_parallel(task, &given, (rows + run - 1) / run, threads);
}

/* Step `step`, which comes after `before` or, below 0, first; its inputs are at `place` of those at hand. */
void slimbayes_lstm_forward(const void *plan, int64_t step, int64_t before, int64_t place, int threads)
{
    by_rows(forward_rows, plan, ((const Forward *)plan)->rows, step, before, place, threads);
}

/* Its gradients: `down` came from the step after, before its factors; inner and outer are written at `place`. */
void slimbayes_lstm_backward(const void *plan, int64_t step, int64_t before, int64_t place, int threads)
{
    by_rows(backward_rows, plan, ((const Backward *)plan)->rows, step, before, place, threads);
}
