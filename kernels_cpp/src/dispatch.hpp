// Which arithmetic unit runs: one table, best first.
#pragma once
#include <string>
#include <vector>

#include "kernels.hpp"

namespace sluice {

std::vector<std::string> available_isas();  // best first, "scalar" last
const Ops* find_isa(const std::string& name);  // null where this machine lacks it
void set_ops(const Ops* table);

}  // namespace sluice
