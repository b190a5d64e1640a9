#pragma once

// Elementary functions of vectors, to a relative error of about 1e-6 or better. The coefficients are minimax fits made
// for this library (relative error below 2e-7 on the reduced range). Infinities, NaN and overflow give the results of
// libm; results below the least normal number may be 0.

#include <limits>

#include "gnnc/simd.h"

namespace gnnc::GNNC_ISA {

template <int N>
GNNC_INLINE Floats polynomial(Floats x, const float (&coefficients)[N]) {
  Floats y = splat(coefficients[N - 1]);
  for (int i = N - 2; i >= 0; --i) y = fused(y, x, splat(coefficients[i]));
  return y;
}

GNNC_INLINE Ints to_ints(Floats v) { return __builtin_convertvector(v, Ints); }

// Returns y * 2^n for a whole n in [-151, 129] and y in [0.5, 2], in two steps: one power of two alone does not reach
// that far.
GNNC_INLINE Floats scale_by_power(Floats y, Floats n) {
#ifdef __AVX512F__
  return _mm512_scalef_ps(y, n);
#else
  const Ints whole = to_ints(n), half = whole >> 1;
  return y * as_floats((half + 127) << 23) * as_floats((whole - half + 127) << 23);
#endif
}

GNNC_INLINE Floats exp(Floats x) {
  constexpr float kFit[] = {4.999999953e-01f, 1.666657369e-01f, 4.166686098e-02f, 8.363739844e-03f, 1.390152973e-03f};
  const Floats bounded = larger(splat(-104.0f), smaller(splat(89.0f), x));  // a NaN stays
  const Floats n = nearest(bounded * splat(1.44269504f));
  // ln 2 is split into two parts, the first with so few bits that its product with n is exact.
  const Floats r = fused(n, splat(2.12194440e-4f), fused(n, splat(-0.693359375f), bounded));
  const Floats y = fused(polynomial(r, kFit), r * r, r) + splat(1.0f);
  return scale_by_power(y, n);
}

// Returns e^x - 1 for x <= 0: 2^n (e^r - 1) + (2^n - 1), whose second term is 0 where the first would lose digits to
// it.
GNNC_INLINE Floats expm1_of_negative(Floats x) {
  constexpr float kFit[] = {5.000000135e-01f, 1.666666530e-01f, 4.166572422e-02f,
                            8.333462019e-03f, 1.398576321e-03f, 1.987700395e-04f};
  const Floats bounded = larger(splat(-104.0f), x);
  const Floats n = nearest(bounded * splat(1.44269504f));
  const Floats r = fused(n, splat(2.12194440e-4f), fused(n, splat(-0.693359375f), bounded));
  const Floats power = scale_by_power(splat(1.0f), n);
  return fused(fused(polynomial(r, kFit), r * r, r), power, power - splat(1.0f));
}

GNNC_INLINE Floats log(Floats x) {
  constexpr float kFit[] = {3.333333112e-01f,  -2.499999358e-01f, 2.000072938e-01f,
                            -1.666811137e-01f, 1.424882526e-01f,  -1.241841758e-01f,
                            1.168051290e-01f,  -1.152965388e-01f, 7.047178374e-02f};
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const Ints subnormal = x < splat(std::numeric_limits<float>::min());
  const Floats scaled = subnormal ? x * splat(8388608.0f) : x;
  const Ints bits = as_ints(scaled) - splat(0x3f3504f3);  // the bits of sqrt(1/2)
  const Ints exponent = (bits >> 23) - (subnormal & 23);
  const Floats f = as_floats((bits & 0x7fffff) + splat(0x3f3504f3)) - splat(1.0f);
  const Floats n = to_floats(exponent), f2 = f * f;
  const Floats tail = fused(n, splat(-2.12194440e-4f), f2 * f * polynomial(f, kFit));
  const Floats result = fused(n, splat(0.693359375f), (tail - splat(0.5f) * f2) + f);
  const Floats special = x == splat(0.0f) ? splat(-kInfinity) : splat(std::numeric_limits<float>::quiet_NaN());
  return (x > splat(0.0f)) & (x < splat(kInfinity)) ? result : (x == splat(kInfinity) ? x : special);
}

// Returns log(1 + x) for x in [0, 1]: twice the area tangent of x / (x + 2), which is at most 1/3.
GNNC_INLINE Floats log1p_of_fraction(Floats x) {
  constexpr float kFit[] = {3.333332017e-01f, 2.000378032e-01f, 1.411830990e-01f, 1.342574901e-01f};
  const Floats part = x / (x + splat(2.0f)), square = part * part, twice = part + part;
  return fused(twice * square, polynomial(square, kFit), twice);
}

#ifdef __AVX512F__
// An estimate of the reciprocal and a step of Newton's method take a third of the time of a division. The step needs a
// finite denominator, so that it takes e^87.3 for all smaller x, where the result is below the least normal number.
GNNC_INLINE Floats sigmoid(Floats x) {
  const Floats least = splat(-87.3f);
  const Floats denominator = splat(1.0f) + exp(-larger(least, x));
  const Floats guess = _mm512_rcp14_ps(denominator);
  const Floats result = fused(guess, fused(-denominator, guess, splat(1.0f)), guess);
  return x < least ? Floats{} : result;
}
GNNC_INLINE Floats silu(Floats x) { return x * sigmoid(x); }
#else
GNNC_INLINE Floats sigmoid(Floats x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }
GNNC_INLINE Floats silu(Floats x) { return x / (splat(1.0f) + exp(-x)); }
#endif
GNNC_INLINE Floats softplus(Floats x) {
  return (x > splat(0.0f) ? x : splat(0.0f)) + log1p_of_fraction(exp(-absolute(x)));
}
GNNC_INLINE Floats elu(Floats x, float alpha) { return x > splat(0.0f) ? x : expm1_of_negative(x) * splat(alpha); }

GNNC_INLINE Floats tanh(Floats x) {
  constexpr float kFit[] = {-3.333332787e-01f, 1.333266390e-01f, -5.383519222e-02f, 2.092434574e-02f,
                            -5.993201154e-03f};
  const Floats z = x * x, size = absolute(x);
  const Floats near = fused(polynomial(z, kFit), z * x, x);
  const Floats far = splat(1.0f) - splat(2.0f) / (exp(size + size) + splat(1.0f));
  return size < splat(0.625f) ? near : (x < splat(0.0f) ? -far : far);
}

// Returns x (1 + erf(x / sqrt 2)) / 2 to full relative accuracy for both signs: for negative x the factor is a small
// tail.
GNNC_INLINE Floats gelu(Floats x) {
  constexpr float kErf[] = {1.128379166e+00f, -3.761262582e-01f, 1.128358515e-01f, -2.685381187e-02f,
                            5.188327559e-03f, -8.010192515e-04f, 7.853857688e-05f};
  // Coefficients of e^(z^2) erfc(z) in t = 1 / (z + 2), for z in [0.5, 11.5].
  constexpr float kTail[] = {2.917205397e-06f, 5.640009012e-01f,  1.133679523e+00f, 1.889611337e+00f,
                             3.682394695e+00f, -3.046105577e+00f, 2.470558365e+01f, -7.565878744e+01f,
                             8.710992890e+01f, -3.676239200e+01f};
  const Floats half = splat(0.5f), u = x * splat(0.707106781f), size = absolute(x);
  const Floats near = fused(u * half, polynomial(u * u, kErf), half);
  const Floats bounded = smaller(size, splat(16.0f));
  const Floats high = as_floats(as_ints(bounded) & ~0xfff);  // the square of `high` is exact
  const Floats gauss = exp(-half * high * high) * exp(half * (high - bounded) * (high + bounded));
  const Floats t = splat(1.0f) / fused(bounded, splat(0.707106781f), splat(2.0f));
  const Floats tail = half * gauss * polynomial(t, kTail);
  const Floats far = x < splat(0.0f) ? tail : splat(1.0f) - tail;
  return x * (size > splat(0.75f) ? far : near);  // a NaN takes `near`
}

// Returns 0.5 x (1 + tanh u) = x sigmoid(2 u).
GNNC_INLINE Floats gelu_tanh(Floats x) {
  const Floats u = x * splat(0.797884561f) * fused(x * x, splat(0.044715f), splat(1.0f));
  return x * sigmoid(u + u);
}

}  // namespace gnnc::GNNC_ISA
