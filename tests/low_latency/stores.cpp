#include "stores.hpp"

#include <algorithm>

void Stores::push(void* at, const void* value, size_t bytes, int block) {
    pending_.push_back({at, bytes, block, {}});
    memcpy(&pending_.back().value, value, bytes);
}

void Stores::perform(size_t stores, bool in_order, std::mt19937& random) {
    if (stores >= pending_.size()) return perform_all();
    for (; stores > 0; stores--) {
        void* const at = pending_[in_order ? 0 : random() % pending_.size()].at;
        const auto there = [&](const Store& store) { return store.at == at; };
        const auto first = std::find_if(pending_.begin(), pending_.end(), there);
        memcpy(first->at, &first->value, first->bytes);
        pending_.erase(first);
    }
}

void Stores::perform_one_in(uint32_t turns, std::mt19937& random) {
    std::vector<const void*> kept;
    perform_if([&](const Store& store) {
        const bool waits = std::find(kept.begin(), kept.end(), store.at) != kept.end();
        if (!waits && random() % turns == 0) return true;
        kept.push_back(store.at);
        return false;
    });
}

void Stores::perform_of(int block) {
    perform_if([&](const Store& store) { return store.block == block; });
}
void Stores::perform_at(const void* at) {
    perform_if([&](const Store& store) { return store.at == at; });
}
void Stores::perform_all() {
    perform_if([](const Store&) { return true; });
}

const void* Stores::find(const void* at, int block) const {
    const auto there = [&](const Store& store) { return store.at == at && store.block == block; };
    const auto last = std::find_if(pending_.rbegin(), pending_.rend(), there);
    return last == pending_.rend() ? nullptr : &last->value;
}

template <class Which>
void Stores::perform_if(Which&& which) {
    if (pending_.empty()) return;
    size_t kept = 0;
    for (Store& store : pending_) {
        if (which(store)) memcpy(store.at, &store.value, store.bytes);
        else pending_[kept++] = store;
    }
    pending_.resize(kept);
}
