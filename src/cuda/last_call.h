// The last call on a device that was not captured, for work that must come after it.
#pragma once

#include "moesaic/status.h"

namespace moesaic::cuda {

// Its device is current in every call, and one thread in at a time.
class LastCall {
 public:
  LastCall() = default;
  LastCall(const LastCall&) = delete;
  LastCall& operator=(const LastCall&) = delete;
  ~LastCall();
  // Of the current device. Once.
  Status create();
  // All that is on `stream` is the last call. Nothing where the stream is captured: the caller orders
  // replays.
  Status end(void* stream);
  // Work that is put on `stream` from now on comes after the last call.
  Status before(void* stream) const;

 private:
  void* event_ = nullptr;
  int device_ = 0;
  bool any_ = false;
};

}  // namespace moesaic::cuda
