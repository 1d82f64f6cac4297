// SPDX-License-Identifier: Apache-2.0
// cuBLAS on a device whose products fail: it has its handle, and what computes says what failed.
#include "device.h"

#define API __attribute__((visibility("default")))

using namespace played;

namespace {

constexpr int NOT_SUPPORTED = 15;  // enum cublasStatus_t

int failure() {
    auto fails = fault_of(current_device, "cublas_error");
    return fails ? (int)fails->value : NOT_SUPPORTED;
}
int prepared() { return fault_of(current_device, "cublas_error") ? OK : NOT_SUPPORTED; }

}  // namespace

extern "C" {

API int cublasCreate_v2(void **handle) {
    static int only;
    *handle = &only;
    return prepared();
}
API int cublasSetStream_v2(void *, void *) { return prepared(); }
API int cublasSetWorkspace_v2(void *, void *, size_t) { return prepared(); }
API int cublasSetPointerMode_v2(void *, int) { return prepared(); }
API int cublasSetMathMode(void *, int) { return prepared(); }
API int cublasGetMathMode(void *, int *mode) {
    *mode = 0;
    return prepared();
}
// The arguments of a product are not read: none is computed.
API int cublasSgemm_v2() { return failure(); }
API int cublasGemmEx() { return failure(); }
API int cublasSgemmStridedBatched() { return failure(); }
API int cublasGemmStridedBatchedEx() { return failure(); }
}
