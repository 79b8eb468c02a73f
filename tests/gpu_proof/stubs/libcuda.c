/* Stands in for the driver's libcuda.so.1, which torch's build for CUDA and Triton open when they are
 * imported. It answers the two questions that are asked without a GPU, and can do nothing else. */

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    (void)device;
    if (flags)
        *flags = 0;
    if (active)
        *active = 0;
    return 0;
}

int cuGetErrorString(int error, const char **text) {
    (void)error;
    *text = "there is no GPU";
    return 0;
}
