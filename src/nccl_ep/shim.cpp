// Calls of NCCL EP that no exception leaves: each gets the library's function, found at run time, and its arguments,
// and returns its status, or a negative number where it threw. What it said goes to `message`, cut to `capacity` bytes.

#include <cstddef>
#include <cstring>
#include <exception>

namespace {

constexpr int THREW = -1;
constexpr int THREW_OTHER = -2;

void keep(const char *text, char *message, std::size_t capacity) noexcept {
    if (capacity == 0) return;
    const std::size_t length = text == nullptr ? 0 : std::strlen(text);
    const std::size_t kept = length < capacity - 1 ? length : capacity - 1;
    if (kept > 0) std::memcpy(message, text, kept);
    message[kept] = '\0';
}

template <class Function, class... Arguments>
int guarded(char *message, std::size_t capacity, Function function, Arguments... arguments) noexcept {
    try {
        return static_cast<int>(function(arguments...));
    } catch (const std::exception &error) {
        keep(error.what(), message, capacity);
        return THREW;
    } catch (...) {
        keep("something that is no std::exception", message, capacity);
        return THREW_OTHER;
    }
}

} // namespace

extern "C" {

int moebius_ep_get_version(char *message, std::size_t capacity, int (*function)(int *), int *version) {
    return guarded(message, capacity, function, version);
}

int moebius_ep_create_group(char *message, std::size_t capacity, int (*function)(void **, void *, const void *),
                            void **group, void *comm, const void *config) {
    return guarded(message, capacity, function, group, comm, config);
}

// For the calls of one opaque object: GroupDestroy, HandleDestroy, ErrorClear.
int moebius_ep_object(char *message, std::size_t capacity, int (*function)(void *), void *object) {
    return guarded(message, capacity, function, object);
}

int moebius_ep_handle_mem_size(char *message, std::size_t capacity,
                               int (*function)(void *, unsigned, const void *, std::size_t *, int), void *group,
                               unsigned layout, const void *config, std::size_t *size, int top_k) {
    return guarded(message, capacity, function, group, layout, config, size, top_k);
}

int moebius_ep_init_handle(char *message, std::size_t capacity,
                           int (*function)(void **, void *, unsigned, const void *, int, const void *), void **handle,
                           void *group, unsigned layout, const void *config, int top_k, const void *memory) {
    return guarded(message, capacity, function, handle, group, layout, config, top_k, memory);
}

int moebius_ep_update_handle(char *message, std::size_t capacity,
                             int (*function)(void *, const void *, const void *, void *), void *handle,
                             const void *ids, const void *info, void *stream) {
    return guarded(message, capacity, function, handle, ids, info, stream);
}

int moebius_ep_dispatch(char *message, std::size_t capacity,
                        int (*function)(void *, const void *, const void *, const void *, const void *, void *),
                        void *handle, const void *inputs, const void *outputs, const void *info, const void *config,
                        void *stream) {
    return guarded(message, capacity, function, handle, inputs, outputs, info, config, stream);
}

int moebius_ep_combine(char *message, std::size_t capacity,
                       int (*function)(void *, const void *, const void *, const void *, void *), void *handle,
                       const void *inputs, const void *outputs, const void *config, void *stream) {
    return guarded(message, capacity, function, handle, inputs, outputs, config, stream);
}

int moebius_ep_complete(char *message, std::size_t capacity, int (*function)(void *, const void *, void *), void *handle,
                        const void *config, void *stream) {
    return guarded(message, capacity, function, handle, config, stream);
}

// For the calls of a group about its mask: MaskQuery, MaskUpdate.
int moebius_ep_mask(char *message, std::size_t capacity, int (*function)(void *, int *, void *), void *group, int *mask,
                    void *stream) {
    return guarded(message, capacity, function, group, mask, stream);
}

int moebius_ep_mask_clean(char *message, std::size_t capacity, int (*function)(void *, void *), void *group,
                          void *stream) {
    return guarded(message, capacity, function, group, stream);
}

int moebius_ep_async_error(char *message, std::size_t capacity, int (*function)(void *, int *), void *group, int *error) {
    return guarded(message, capacity, function, group, error);
}

// For tests: a function that throws.
int moebius_ep_throwing(int kind) {
    struct Failure : std::exception {
        const char *what() const noexcept override { return "thrown on purpose"; }
    };
    if (kind == 0) throw Failure();
    if (kind == 1) throw 7;
    return kind;
}

int moebius_ep_test(char *message, std::size_t capacity, int kind) {
    return guarded(message, capacity, moebius_ep_throwing, kind);
}

} // extern "C"
