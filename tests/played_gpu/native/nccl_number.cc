// SPDX-License-Identifier: Apache-2.0
#include "nccl.h"

#include <cmath>
#include <cstring>

namespace played::nccl {
namespace {

enum Type { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 };
enum Operation { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE, FIRST_MADE };
constexpr size_t BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

float from_half(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                       : exponent     ? ldexpf(1024 + fraction, exponent - 25)
                                      : ldexpf(fraction, -24);
    return bits & 0x8000 ? -size : size;
}
uint16_t to_half(float value) {
    const _Float16 half = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}
float from_bfloat(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}
uint16_t to_bfloat(float value) {  // to the nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return std::isnan(value) ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
template <class T>
T same(T value) {
    return value;
}

template <class A>
A combined(A a, A b, int operation) {
    switch (operation) {
        case PRODUCT: return a * b;
        case MAXIMUM: return a > b ? a : b;
        case MINIMUM: return a < b ? a : b;
        default: return a + b;
    }
}

// Numbers stored as T, added up as A.
template <class T, class A>
void fold(char *to, const char *from, size_t count, int ranks, int operation, double scale, A (*get)(T), T (*put)(A)) {
    auto *out = (T *)to;
    for (size_t i = 0; i < count; i++) {
        A value{};
        for (int rank = 0; rank < ranks; rank++) {
            A next = get(((const T *)(from + rank * count * sizeof(T)))[i]);
            if (operation >= FIRST_MADE) next = (A)(next * scale);
            value = rank ? combined(value, next, operation) : next;
        }
        out[i] = put(operation == AVERAGE ? (A)(value / (A)ranks) : value);
    }
}

}  // namespace

size_t bytes_of(int type) { return BYTES[type]; }

void reduce(char *to, const char *from, size_t n, int k, int type, int op, double scale) {
    switch (type) {
        case INT8: return fold<int8_t, int8_t>(to, from, n, k, op, scale, same, same);
        case UINT8: return fold<uint8_t, uint8_t>(to, from, n, k, op, scale, same, same);
        case INT32: return fold<int32_t, int32_t>(to, from, n, k, op, scale, same, same);
        case UINT32: return fold<uint32_t, uint32_t>(to, from, n, k, op, scale, same, same);
        case INT64: return fold<int64_t, int64_t>(to, from, n, k, op, scale, same, same);
        case UINT64: return fold<uint64_t, uint64_t>(to, from, n, k, op, scale, same, same);
        case FLOAT16: return fold<uint16_t, float>(to, from, n, k, op, scale, from_half, to_half);
        case FLOAT32: return fold<float, float>(to, from, n, k, op, scale, same, same);
        case FLOAT64: return fold<double, double>(to, from, n, k, op, scale, same, same);
        case BFLOAT16: return fold<uint16_t, float>(to, from, n, k, op, scale, from_bfloat, to_bfloat);
    }
}

double scalar(const void *value, int type) {
    switch (type) {
        case FLOAT16: return from_half(*(const uint16_t *)value);
        case BFLOAT16: return from_bfloat(*(const uint16_t *)value);
        case FLOAT32: return *(const float *)value;
        case FLOAT64: return *(const double *)value;
    }
    return 1;
}

}  // namespace played::nccl
