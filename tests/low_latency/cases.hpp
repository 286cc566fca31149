// Cases of few calls, each of which one of the kernels' precautions is for. They take a seed.
#pragma once
#include <stdint.h>

#include <string>

void tags_of_one_half(const std::string& library, uint32_t seed);
void ranks_ahead(const std::string& library, uint32_t seed);
void rows_of_one_batch(const std::string& library, uint32_t seed);
void lost_in_a_sweep(const std::string& library, uint32_t seed);
void late_to_one_call(const std::string& library, uint32_t seed);
void few_rows_back(const std::string& library, uint32_t seed);
void records_in_part(const std::string& library, uint32_t seed);
void gone_for_good(const std::string& library, uint32_t seed);
