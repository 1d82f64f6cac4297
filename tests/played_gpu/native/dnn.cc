// SPDX-License-Identifier: Apache-2.0
// cuDNN on a device whose layers fail: it is there, and what computes says what failed.
#include "device.h"

#define API __attribute__((visibility("default")))

using namespace played;

namespace {

constexpr size_t VERSION = 91900;  // as cudnnGetVersion says 9.19
int prepared() { return fault_of(current_device, "cudnn_error") ? OK : NOT_SUPPORTED; }
int failure() {
    auto fails = fault_of(current_device, "cudnn_error");
    return fails ? (int)fails->value : NOT_SUPPORTED;
}
int created(void **made) {
    static int only;
    *made = &only;
    return prepared();
}

}  // namespace

extern "C" {

API size_t cudnnGetVersion() { return prepared() == OK ? VERSION : 0; }
API const char *cudnnGetErrorString(int status) {  // enum cudnnStatus_t, of cuDNN 9
    switch (status) {
        case 0: return "CUDNN_STATUS_SUCCESS";
        case 4000: return "CUDNN_STATUS_INTERNAL_ERROR";
        case 5000: return "CUDNN_STATUS_EXECUTION_FAILED";
        case 5003: return "CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER";
        default: return "CUDNN_STATUS_NOT_SUPPORTED";
    }
}
API void cudnnGetLastErrorString(char *text, size_t size) {
    if (size) *text = 0;
}

API int cudnnCreate(void **handle) { return created(handle); }
API int cudnnSetStream(void *, void *) { return prepared(); }
API int cudnnCreateTensorDescriptor(void **made) { return created(made); }
API int cudnnSetTensorNdDescriptor(void *, int, int, const int *, const int *) { return prepared(); }
API int cudnnDestroyTensorDescriptor(void *) { return prepared(); }

// Of a normalisation over a batch: what it needs is a byte, and none is used.
API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *, int, int, void *, void *, void *, void *, void *,
                                                                 size_t *size) {
    *size = 1;
    return prepared();
}
API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *, int, int, void *, void *, size_t *size) {
    *size = 1;
    return prepared();
}
API int cudnnBatchNormalizationForwardTrainingEx() { return failure(); }
}
