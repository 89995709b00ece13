// The arguments of `gemv` and `gemv_dots`, which the host writes and reads with one type.
layout(push_constant) uniform Args {
    Words4In weight;
    Floats4In x;
    Floats4In norm;
    FloatsIn bias;
    FloatsInOut y;
    uint n;           // rows of W
    uint k;           // columns of W and x without padding; the divisor of the mean
    uint chunks;      // 8-value chunks of a padded row of W
    uint x_stride;    // in floats
    uint y_stride;    // in floats
    float epsilon;
    uint rows;        // of x
};
