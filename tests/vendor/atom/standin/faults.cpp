#include "faults.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>

namespace standin {
namespace {

// Named by the environment, or by a test through standin_watch_faults.
std::string& Path() {
  static std::string* path = new std::string(std::getenv("STANDIN_FAULTS") ? std::getenv("STANDIN_FAULTS") : "");
  return *path;
}

std::optional<Fault>& Armed() {
  static std::optional<Fault>* armed = new std::optional<Fault>();
  return *armed;
}

// The value of a key in one flat JSON object of texts and whole numbers.
std::string ValueOf(const std::string& text, const std::string& key) {
  const size_t at = text.find("\"" + key + "\"");
  if (at == std::string::npos) return "";
  const size_t colon = text.find(':', at);
  const size_t first = text.find_first_not_of(" \"", colon + 1);
  return text.substr(first, text.find_first_of("\",}", first) - first);
}

uint64_t NumberOf(const std::string& text, const std::string& key, uint64_t otherwise) {
  const std::string value = ValueOf(text, key);
  return value.empty() ? otherwise : std::stoull(value);
}

std::optional<Fault> Parse(const std::string& text) {
  const std::string operation = ValueOf(text, "operation"), effect = ValueOf(text, "effect");
  Fault fault{};
  if (operation == "write") fault.operation = Operation::kWrite;
  else if (operation == "read") fault.operation = Operation::kRead;
  else if (operation == "release") fault.operation = Operation::kRelease;
  else if (operation == "fence") fault.operation = Operation::kFence;
  else return std::nullopt;
  fault.effect = effect == "flip" ? Effect::kFlip : effect == "torn" ? Effect::kTorn : Effect::kError;
  fault.skip = NumberOf(text, "skip", 0);
  fault.count = NumberOf(text, "count", 1);
  fault.bit = NumberOf(text, "bit", 0);
  return fault;
}

}  // namespace

const Fault* Take(Operation operation) {
  static Fault taken;
  std::optional<Fault>& armed = Armed();
  if (Path().empty()) return nullptr;
  if (access(Path().c_str(), R_OK) != 0) armed.reset();
  else if (!armed) {
    std::ifstream file(Path());
    armed = Parse(std::string(std::istreambuf_iterator<char>(file), {}));
  }
  if (!armed || armed->operation != operation) return nullptr;
  if (armed->skip > 0) {
    armed->skip -= 1;
    return nullptr;
  }
  taken = *armed;
  if (armed->count <= 1) {
    unlink(Path().c_str());
    armed.reset();
  } else {
    armed->count -= 1;
  }
  return &taken;
}

void Flip(unsigned char* bytes, uint64_t nbytes, const Fault& fault) {
  bytes[fault.bit / 8 % nbytes] ^= static_cast<unsigned char>(1U << fault.bit % 8);
}

}  // namespace standin

extern "C" void standin_watch_faults(const char* path) {
  standin::Path() = path;
  standin::Armed().reset();
}
