// Checks the code and the key words of a refusal.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

#include "moesaic/status.h"

namespace moesaic::test {

inline void expect_refusal(const Status& s, StatusCode code,
                           std::initializer_list<const char*> words) {
  EXPECT_EQ(status_code_name(s.code()), status_code_name(code)) << s.message();
  for (const char* word : words) {
    EXPECT_NE(s.message().find(word), std::string::npos) << s.message() << " lacks " << word;
  }
}

}  // namespace moesaic::test
