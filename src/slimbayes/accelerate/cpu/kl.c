/* The KL of normal factors against a normal prior, all factors of a network in one call, and its gradients. */

#include "parallel.h"
#include "random.h"
#include "scales.h"

#define STRIP 64

typedef struct {
    const float *const *locs, *const *rhos;
    const int64_t *counts;
    double *totals;
    float *const *grad_locs, *const *grad_rhos;
    float centre, precision, grad;
} Divergence;

/* sum of (sigma^2 + (loc - centre)^2) precision / 2 - log sigma over one factor */
VECTORISED static void total_of_factor(void *context, int64_t which)
{
    const Divergence *d = context;
    const float *restrict loc = d->locs[which], *restrict rho = d->rhos[which];
    float centre = d->centre, half = 0.5f * d->precision;
    double total = 0.0;
    for (int64_t start = 0; start < d->counts[which]; start += STRIP) {
        float terms[STRIP];
        int64_t size = d->counts[which] - start < STRIP ? d->counts[which] - start : STRIP;
        for (int64_t i = 0; i < size; i++) {
            float shift = loc[start + i] - centre, scale = scale_of(rho[start + i]);
            terms[i] = half * (scale * scale + shift * shift) - log_of(scale);
        }
        for (int64_t i = 0; i < size; i++)
            total += terms[i];
    }
    d->totals[which] = total;
}

VECTORISED static void gradients_of_factor(void *context, int64_t which)
{
    const Divergence *d = context;
    const float *restrict loc = d->locs[which], *restrict rho = d->rhos[which];
    float *restrict of_loc = d->grad_locs[which], *restrict of_rho = d->grad_rhos[which];
    float centre = d->centre, precision = d->precision, grad = d->grad;
    for (int64_t i = 0; i < d->counts[which]; i++) {
        float scale = scale_of(rho[i]);
        of_loc[i] = (loc[i] - centre) * precision * grad;
        of_rho[i] = (scale * precision - 1.0f / scale) * sigmoid_of(rho[i]) * grad;
    }
}

/* One total for each factor, to be summed by the caller. */
void slimbayes_normal_kl(const float *const *locs, const float *const *rhos, const int64_t *counts, int64_t factors,
                         float centre, float precision, double *totals, int threads)
{
    Divergence d = {.locs = locs, .rhos = rhos, .counts = counts, .totals = totals, .centre = centre,
                    .precision = precision};
    in_parallel(total_of_factor, &d, factors, threads);
}

void slimbayes_normal_kl_gradients(const float *const *locs, const float *const *rhos, const int64_t *counts,
                                   int64_t factors, float centre, float precision, float grad,
                                   float *const *grad_locs, float *const *grad_rhos, int threads)
{
    Divergence d = {.locs = locs, .rhos = rhos, .counts = counts, .grad_locs = grad_locs, .grad_rhos = grad_rhos,
                    .centre = centre, .precision = precision, .grad = grad};
    in_parallel(gradients_of_factor, &d, factors, threads);
}
