// Norm and rotary of one head, by all threads of a workgroup that own its dimensions.
// Needs before inclusion: D (head_dim), ROT (rotated dims), QK_NORM; after inclusion the
// caller provides `rope` (FloatsIn: per position ROT/2 pairs cos, sin).

// Rotates value `i` of a head whose (normalised) values `at(i)` are in shared memory.
#define ROTATE(at, i, position, result)                                        \
    {                                                                          \
        float own = at(i);                                                     \
        if ((i) < ROT) {                                                       \
            uint half_dim = ROT / 2u;                                          \
            uint j = (i) < half_dim ? (i) : (i) - half_dim;                    \
            uint o = ((position) * half_dim + j) * 2u;                         \
            float c = rope.v[o], s = rope.v[o + 1u];                           \
            float other = (i) < half_dim ? -at((i) + half_dim) : at((i) - half_dim); \
            result = own * c + other * s;                                      \
        } else {                                                               \
            result = own;                                                      \
        }                                                                      \
    }
