/* What the gradients of folded weights give: with G_d the gradient of W * l_d r_d^T, dW = sum_d G_d * l_d r_d^T,
   dl_d = (G_d * W) r_d and dr_d = (G_d * W)^T l_d, in one sweep over all G_d and W. */

#include "parallel.h"
#include "random.h"

#define STRIP 32 /* lanes of a sum along a line */

typedef struct {
    const float *own, *weight, *left, *right;
    float *grad_w, *grad_l, *grad_r, *slots;
    int64_t draws, lines, width, run;
    int32_t add;
} Fold;

/* One line of one draw; l is its left factor. */
INLINE void fold_line(const float *restrict g, const float *restrict w, const float *restrict right, float l,
                      float *restrict of_w, float *restrict of_right, float *of_left, int64_t width)
{
    if (of_w && right)
        for (int64_t j = 0; j < width; j++)
            of_w[j] += g[j] * right[j] * l;
    else if (of_w)
        for (int64_t j = 0; j < width; j++)
            of_w[j] += g[j] * l;
    if (of_right)
        for (int64_t j = 0; j < width; j++)
            of_right[j] += g[j] * w[j] * l;
    if (!of_left)
        return;
    float strip[STRIP] = {0}, total = 0.0f;
    int64_t j = 0;
    if (right)
        for (; j + STRIP <= width; j += STRIP)
            for (int k = 0; k < STRIP; k++)
                strip[k] += g[j + k] * w[j + k] * right[j + k];
    else
        for (; j + STRIP <= width; j += STRIP)
            for (int k = 0; k < STRIP; k++)
                strip[k] += g[j + k] * w[j + k];
    for (int k = 0; j < width; j++, k++)
        strip[k] += g[j] * w[j] * (right ? right[j] : 1.0f);
    for (int k = 0; k < STRIP; k++)
        total += strip[k];
    *of_left = total;
}

VECTORISED static void fold_part(void *context, int64_t part)
{
    const Fold *f = context;
    int64_t width = f->width, first = part * f->run, last = first + f->run;
    last = last < f->lines ? last : f->lines;
    float *sums = f->grad_r ? f->slots + part * f->draws * width : 0;
    if (sums)
        memset(sums, 0, (size_t)(f->draws * width) * sizeof(float));
    for (int64_t i = first; i < last; i++) {
        float *of_w = f->grad_w ? f->grad_w + i * width : 0;
        if (of_w && !f->add)
            memset(of_w, 0, (size_t)width * sizeof(float));
        for (int64_t d = 0; d < f->draws; d++) {
            int64_t line = d * f->lines + i;
            fold_line(f->own + line * width, f->weight + i * width, f->right ? f->right + d * width : 0,
                      f->left ? f->left[line] : 1.0f, of_w, sums ? sums + d * width : 0,
                      f->grad_l ? f->grad_l + line : 0, width);
        }
    }
}

/* own = G [draws, lines, width], weight [lines, width]; left [draws, lines] and right [draws, width], or null for ones;
   the gradients wanted, else null: grad_w is added to if `add`; slots: room for ceil(lines / run) * draws * width. */
VECTORISED void slimbayes_fold(const float *own, const float *weight, const float *left, const float *right,
                               float *grad_w, float *grad_l, float *grad_r, float *slots, int64_t draws,
                               int64_t lines, int64_t width, int64_t run, int add, int threads)
{
    Fold fold = {own, weight, left, right, grad_w, grad_l, grad_r, slots, draws, lines, width, run, add};
    int64_t parts = (lines + run - 1) / run;
    in_parallel(fold_part, &fold, parts, threads);
    if (!grad_r)
        return;
    memset(grad_r, 0, (size_t)(draws * width) * sizeof(float));
    for (int64_t part = 0; part < parts; part++)
        for (int64_t j = 0; j < draws * width; j++)
            grad_r[j] += slots[part * draws * width + j];
}
