// kvkeep's operators as C functions for programs compiled by torch's AOTInductor, which derives the
// signatures from the operators' schemas (kvkeep.graph.shims).
#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "tensors.h"

namespace {

constexpr int32_t DONE = 0, FAILED = 1;  // results in torch's interface

bool describe_optional(KvAtenTensor** given, KvTensor& x) {
    x = {};
    return !given || !*given || describe(*given, x);
}

// An operator's result: a new contiguous tensor, deleted unless it is handed over.
class Result {
  public:
    Result(const std::vector<int64_t>& sizes, int64_t type) {
        std::vector<int64_t> strides(sizes.size());
        int64_t stride = 1;
        for (size_t i = sizes.size(); i-- > 0; stride *= sizes[i]) strides[i] = stride;
        if (torch.empty_strided((int64_t)sizes.size(), sizes.data(), strides.data(), (int32_t)type,
                                CPU, 0, &made))
            made = nullptr;
        else
            described = describe(made, tensor);
    }
    Result(const Result&) = delete;
    ~Result() {
        if (made) torch.drop(made);
    }
    bool ok() const { return described; }
    int32_t give(KvAtenTensor** out) {
        *out = made;
        made = nullptr;
        return DONE;
    }
    KvTensor tensor = {};

  private:
    KvAtenTensor* made = nullptr;
    bool described = false;
};

// The elements of x, contiguous: x's own memory, or `copy`.
const void* contiguous(const KvTensor& x, int64_t size, std::vector<char>& copy) {
    int64_t count = 1;
    bool dense = true;
    for (int64_t i = x.dim; i-- > 0; count *= x.sizes[i])
        dense &= x.sizes[i] == 1 || x.strides[i] == count;
    if (dense) return x.data;
    copy.resize(count * size);
    for (int64_t n = 0; n < count; ++n) {
        int64_t from = 0, rest = n;
        for (int64_t i = x.dim; i-- > 0; rest /= x.sizes[i])
            from += rest % x.sizes[i] * x.strides[i];
        memcpy(copy.data() + n * size, (const char*)x.data + from * size, size);
    }
    return copy.data();
}

// A matrix in memory that stays its owner's, as a tensor of torch.
class Matrix {
  public:
    Matrix(const void* data, int64_t rows, int64_t columns, int64_t row, int64_t column,
           int64_t type) {
        const int64_t sizes[] = {rows, columns}, strides[] = {row, column};
        if (torch.from_blob((void*)data, 2, sizes, strides, 0, (int32_t)type, CPU, 0, &made))
            made = nullptr;
    }
    Matrix(const Matrix&) = delete;
    ~Matrix() {
        if (made) torch.drop(made);
    }
    KvAtenTensor* made = nullptr;
};

// x (rows, inputs), contiguous, times one expert's weight (inputs, outputs): by the kernel if it
// can read the weight, otherwise by torch.
bool multiply(const char* x, int64_t rows, const KvTensor& weight, int64_t expert, int64_t threads,
              char* out) {
    const int64_t type = weight.type, size = size_of(type), inputs = weight.sizes[1],
                  outputs = weight.sizes[2];
    const char* own = (const char*)weight.data + expert * weight.strides[0] * size;
    if (type_of(type) < 0 || weight.strides[1] != 1) {
        const Matrix a(x, rows, inputs, inputs, 1, type), c(out, rows, outputs, outputs, 1, type);
        const Matrix b(own, inputs, outputs, weight.strides[1], weight.strides[2], type);
        return a.made && b.made && c.made && !torch.mm_out(c.made, a.made, b.made);
    }
    const KvLinear linear = {own,    nullptr, nullptr,           type_of(type),
                             inputs, outputs, weight.strides[2], (int64_t)threads};
    return !kv_linear(&linear, 1, x, inputs, rows, out);
}

KvTicket* ticket_of(KvAtenTensor* given) {
    void* data = nullptr;
    return torch.data(given, &data) ? nullptr : (KvTicket*)data;
}

// Whether a prepared step accepts x (rows, heads, 1, width).
bool fits(const KvTensor& x, const KvLayout& layout, int64_t type) {
    return x.dim == 4 && x.sizes[1] == layout.heads && x.sizes[2] == 1 &&
           x.sizes[3] == layout.width && x.strides[1] == layout.head && x.strides[3] == 1 &&
           type_of(x.type) == type && (!layout.row || x.strides[0] == layout.row);
}

bool fits(const KvTracedStep& step, const KvTicket& ticket) {
    const KvKind& kind = *ticket.kind;
    return fits(step.q, kind.q, kind.type) && fits(step.k, kind.k, kind.type) &&
           fits(step.v, kind.v, kind.type) && step.scale == kind.scale &&
           step.softcap == kind.softcap && !step.sinks.data && !step.until.data &&
           !step.bias.data && step.q.sizes[0] >= ticket.rows;
}

int run_prepared(const KvTracedStep& step, KvTicket& ticket) {
    const int64_t size = size_of(step.q.type);
    const int64_t group = step.q.sizes[1] / step.k.sizes[1];
    const KvTensor &q = step.q, &k = step.k, &v = step.v, &out = step.out;
    const int64_t made = ticket.rows * out.strides[0], all = out.sizes[0] * out.strides[0];
    if (made < all) memset((char*)out.data + made * size, 0, (all - made) * size);
    const KvTokens tokens = {(const char*)q.data,
                             (const char*)k.data,
                             (const char*)v.data,
                             (char*)out.data,
                             nullptr,
                             0,
                             size * q.strides[0],
                             size * k.strides[0],
                             size * v.strides[0],
                             size * out.strides[0],
                             size * group * q.strides[1],
                             size * k.strides[1],
                             size * v.strides[1],
                             size * group * out.strides[1]};
    return kv_step(ticket.sequences, ticket.count, &tokens);
}

}  // namespace

void kv_drop(KvAtenTensor** made, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        if (made[i]) torch.drop(made[i]);
}

int kv_run_program(const KvProgram* program, const KvTensor* inputs, int64_t count,
                   KvTensor* results, KvAtenTensor** made, int64_t made_count) try {
    std::vector<KvAtenTensor*> given(count);
    std::fill_n(made, made_count, nullptr);
    for (int64_t i = 0; i < count; ++i) {
        const KvTensor& x = inputs[i];
        if (torch.from_blob(x.data, x.dim, x.sizes, x.strides, 0, (int32_t)x.type, CPU, 0,
                            &given[i])) {
            kv_drop(given.data(), i);
            return 1;
        }
    }
    // The program deletes the inputs, also if it fails.
    bool good =
        !program->run(program->container, given.data(), count, made, made_count, nullptr, nullptr);
    for (int64_t i = 0; good && i < made_count; ++i) good = describe(made[i], results[i]);
    if (!good) kv_drop(made, made_count);
    return !good;
} catch (const std::bad_alloc&) {
    return 1;
}

extern "C" {

KV_PUBLIC int32_t aoti_torch_cpu_fed(KvAtenTensor* of, KvAtenTensor** out) try {
    const KvTicket* ticket = ticket_of(of);
    Result result({}, INT64);
    if (!ticket || !result.ok()) return FAILED;
    *(int64_t*)result.tensor.data = ticket->fed;
    return result.give(out);
} catch (const std::bad_alloc&) {
    return FAILED;
}

KV_PUBLIC int32_t aoti_torch_cpu_next_positions(KvAtenTensor* of, int64_t n, KvAtenTensor** real,
                                                int32_t, int32_t, KvAtenTensor** out) try {
    const KvTicket* ticket = ticket_of(of);
    Result result({1, n}, INT32);
    if (!ticket || (real && *real) || !result.ok()) return FAILED;
    for (int64_t i = 0; i < n; ++i) ((int32_t*)result.tensor.data)[i] = (int32_t)(ticket->fed + i);
    return result.give(out);
} catch (const std::bad_alloc&) {
    return FAILED;
}

KV_PUBLIC int32_t aoti_torch_cpu_step(KvAtenTensor* of, KvAtenTensor* q, KvAtenTensor* k,
                                      KvAtenTensor* v, KvAtenTensor* position, double scale,
                                      double* softcap, KvAtenTensor** sinks, KvAtenTensor** until,
                                      KvAtenTensor** bias, KvAtenTensor** out) try {
    KvTracedStep step;
    KvTicket* ticket = ticket_of(of);
    if (!ticket || !describe(q, step.q) || !describe(k, step.k) || !describe(v, step.v) ||
        !describe(position, step.position) || !describe_optional(sinks, step.sinks) ||
        !describe_optional(until, step.until) || !describe_optional(bias, step.bias))
        return FAILED;
    const int64_t* sizes = step.q.sizes;
    Result result({sizes[0], sizes[1], sizes[2], step.v.sizes[3]}, step.q.type);
    if (!result.ok()) return FAILED;
    step.out = result.tensor;
    step.number = ticket->number;
    step.scale = scale, step.softcap = softcap ? *softcap : 0;
    if (ticket->self != ticket || !ticket->count || !fits(step, *ticket)) {
        if (torch.step(&step) == KV_MADE) return result.give(out);
        ticket->result = KV_STEP_RAISED;
        return FAILED;
    }
    ticket->result = run_prepared(step, *ticket);
    return ticket->result == KV_STEP_DONE ? result.give(out) : FAILED;
} catch (const std::bad_alloc&) {
    return FAILED;
}

KV_PUBLIC int32_t aoti_torch_cpu_linears(KvAtenTensor* input, KvAtenTensor** weights, int64_t count,
                                         KvAtenTensor*** biases, int64_t, KvAtenTensor** scales,
                                         int64_t scaled, KvAtenTensor** out) try {
    KvTensor x;
    uint32_t threads = 1;
    if (!describe(input, x) || torch.threads(&threads) || type_of(x.type) < 0 || !x.dim || !count)
        return FAILED;
    std::vector<KvLinear> linears;
    int64_t outputs = 0, rows = 1;
    for (int64_t i = 0; i < count; ++i) {
        KvTensor weight, bias, scale = {};
        if (!describe(weights[i], weight) || !describe_optional(biases[i], bias)) return FAILED;
        if (scaled && !describe(scales[i], scale)) return FAILED;
        linears.push_back({weight.data, bias.data, (const float*)scale.data, type_of(x.type),
                           weight.sizes[1], weight.sizes[0], weight.strides[0], threads});
        outputs += weight.sizes[0];
    }
    std::vector<int64_t> sizes(x.sizes, x.sizes + x.dim);
    sizes.back() = outputs;
    for (int64_t i = 0; i + 1 < x.dim; ++i) rows *= x.sizes[i];
    std::vector<char> copy;
    const void* tokens = contiguous(x, size_of(x.type), copy);
    Result result(sizes, x.type);
    const int64_t inputs = x.sizes[x.dim - 1];
    if (!result.ok() || kv_linear(linears.data(), count, tokens, inputs, rows, result.tensor.data))
        return FAILED;
    return result.give(out);
} catch (const std::bad_alloc&) {
    return FAILED;
}

KV_PUBLIC int32_t aoti_torch_cpu_grouped(KvAtenTensor* input, KvAtenTensor* weights,
                                         KvAtenTensor* offs, KvAtenTensor** out) try {
    KvTensor x, weight, ends;
    uint32_t threads = 1;
    if (!describe(input, x) || !describe(weights, weight) || !describe(offs, ends) ||
        torch.threads(&threads) || !size_of(x.type) || x.type != weight.type || x.dim != 2 ||
        weight.dim != 3)
        return FAILED;
    const int64_t size = size_of(x.type), inputs = weight.sizes[1], outputs = weight.sizes[2],
                  rows = x.sizes[0];
    Result result({rows, outputs}, x.type);
    if (!result.ok()) return FAILED;
    std::vector<char> copy;
    const char* from = (const char*)contiguous(x, size, copy);
    char* to = (char*)result.tensor.data;
    int64_t start = 0;
    for (int64_t e = 0; e < weight.sizes[0]; ++e) {
        const int64_t at = e * ends.strides[0];
        const int64_t said =
            ends.type == INT32 ? ((const int32_t*)ends.data)[at] : ((const int64_t*)ends.data)[at];
        const int64_t end = std::min(said, rows);
        if (end <= start) continue;
        if (!multiply(from + start * inputs * size, end - start, weight, e, threads,
                      to + start * outputs * size))
            return FAILED;
        start = end;
    }
    memset(to + start * outputs * size, 0, (rows - start) * outputs * size);
    return result.give(out);
} catch (const std::bad_alloc&) {
    return FAILED;
}
}
