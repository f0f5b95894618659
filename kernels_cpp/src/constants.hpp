// Polynomials of our transcendental functions, shared by every unit so that no copy can drift. Fitted by a Remez
// exchange in 40 digits on the intervals named; each function is within 2 ulp of the truth (tests against mpmath).
#pragma once
#include <stdint.h>

namespace sluice {
namespace {

constexpr float kLog2e = 0x1.715476p+0f;
constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds to the nearest integer
constexpr float kLn2High = 0x1.62e400p-1f;  // few enough bits that n * kLn2High is exact for |n| <= 2^8
constexpr float kLn2Low = 0x1.7f7d1cp-20f;
constexpr float kExpLow = -104.5f;   // below: rounds to zero
constexpr float kExpHigh = 89.0f;    // above: infinity

// exp(r) = 1 + r + r^2 P(r), |r| <= ln2/2
constexpr float kExp0 = 0.5f, kExp1 = 0.16666513681411743f, kExp2 = 0.041666191071271896f,
                kExp3 = 0.00836953055113554f, kExp4 = 0.0013951577711850405f;

// tanh(x) = x + x z P(z), z = x^2, |x| <= 0.625
constexpr float kTanhSmall = 0.625f;
constexpr float kTanh0 = -0.3333333134651184f, kTanh1 = 0.13333211839199066f, kTanh2 = -0.05394745618104935f,
                kTanh3 = 0.021704155951738358f, kTanh4 = -0.008185265585780144f, kTanh5 = 0.002149670384824276f;

// log(1+f) = f - (f^2/2 - s (f^2/2 + z P(z))), s = f/(2+f), z = s^2, -1/4 <= f < 1/2
constexpr float kLog0 = 0.6666666269302368f, kLog1 = 0.40000802278518677f, kLog2 = 0.2850935161113739f,
                kLog3 = 0.2407236397266388f;
constexpr float kSoftplusLinear = 20.0f;  // softplus(x) = x above: the difference is below half an ulp

// int8 activations: groups whose largest magnitude is below kInt8Tiny count as zeros (127/amax would overflow).
constexpr float kInt8Tiny = 0x1p-100f, kInt8Steps = 127.0f;

// 2^(byte-127) for an E8M0 byte; 0 is the subnormal 2^-127. A table of 1 KiB stays in L1 and costs one load where
// computing costs three operations. Byte 255 (NaN in the format) is refused before it comes here.
struct ScaleTable {
  uint32_t bits[256];
  constexpr ScaleTable() : bits() {
    for (int i = 0; i < 256; ++i) bits[i] = i == 0 ? 0x00400000u : uint32_t(i) << 23;
  }
};
constexpr ScaleTable kScaleTable = ScaleTable();
inline const float* scale_float(unsigned char byte) {
  return reinterpret_cast<const float*>(&kScaleTable.bits[byte]);
}

}  // namespace
}  // namespace sluice
