/* test_plan: the slices of a plan. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "plan.h"

static const struct model_config config = {
    .n_layers = 4, .d_model = 64, .n_heads = 4, .n_kv_heads = 2, .d_head = 16, .d_ff = 96, .n_vocab = 100,
};

static struct dmat matrix(int64_t rows, int64_t cols, const uint8_t *data)
{
    return (struct dmat){.type = DT_Q8_0, .rows = rows, .cols = cols, .data = data, .row_stride = dtype_row_bytes(DT_Q8_0, cols)};
}

static void one_rank_holds_everything(void **state)
{
    static const uint8_t data[1];
    struct plan_rank r = plan_single(&config);
    (void)state;
    for (enum role role = 0; role < ROLE_COUNT; role++) {
        struct dmat whole = matrix(64, 64, data);
        if (role == ROLE_K || role == ROLE_V) whole = matrix(32, 64, data);
        if (role == ROLE_GATE || role == ROLE_UP) whole = matrix(96, 64, data);
        if (role == ROLE_DOWN) whole = matrix(64, 96, data);
        if (role == ROLE_HEAD) whole = matrix(100, 64, data);
        if (whole.rows == 64 && (role == ROLE_K_BIAS || role == ROLE_V_BIAS || role == ROLE_SINKS || role == ROLE_GATE_BIAS ||
                                 role == ROLE_UP_BIAS))
            continue; /* vectors, below */
        struct dmat s = plan_slice(&config, &r, role, whole);
        assert_int_equal(s.rows, whole.rows);
        assert_int_equal(s.cols, whole.cols);
        assert_ptr_equal(s.data, whole.data);
    }
    static const struct { enum role role; int n; } vectors[] = {
        {ROLE_OUT_NORM, 64}, {ROLE_ATTN_NORM, 64}, {ROLE_FFN_NORM, 64}, {ROLE_Q_BIAS, 64}, {ROLE_K_BIAS, 32}, {ROLE_V_BIAS, 32},
        {ROLE_O_BIAS, 64}, {ROLE_Q_NORM, 16}, {ROLE_K_NORM, 16}, {ROLE_SINKS, 4}, {ROLE_GATE_BIAS, 96}, {ROLE_UP_BIAS, 96},
        {ROLE_DOWN_BIAS, 64},
    };
    for (size_t i = 0; i < COUNT_OF(vectors); i++) {
        struct range s = plan_slice_vec(&config, &r, vectors[i].role);
        assert_int_equal(s.begin, 0);
        assert_int_equal(s.end, vectors[i].n);
    }
}

static void slices_fall_where_the_plan_says(void **state)
{
    static const uint8_t data[1];
    struct plan_rank r = plan_single(&config);
    (void)state;
    r.heads = (struct range){2, 4};
    r.kv_heads = (struct range){1, 2};
    r.ffn = (struct range){32, 96};
    struct dmat q = plan_slice(&config, &r, ROLE_Q, matrix(64, 64, data));
    assert_int_equal(q.rows, 32);
    assert_int_equal(q.data - data, 32 * 68);
    struct dmat k = plan_slice(&config, &r, ROLE_K, matrix(32, 64, data));
    assert_int_equal(k.rows, 16);
    assert_int_equal(k.data - data, 16 * 68);
    struct dmat o = plan_slice(&config, &r, ROLE_O, matrix(64, 64, data));
    assert_int_equal(o.rows, 64);
    assert_int_equal(o.cols, 32);
    assert_int_equal(o.data - data, 34);
    struct dmat down = plan_slice(&config, &r, ROLE_DOWN, matrix(64, 96, data));
    assert_int_equal(down.cols, 64);
    assert_int_equal(down.data - data, 34);
    struct range sinks = plan_slice_vec(&config, &r, ROLE_SINKS);
    assert_int_equal(sinks.begin, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_rank_holds_everything),
        cmocka_unit_test(slices_fall_where_the_plan_says),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
