// Keeps signals away from the threads that this library starts.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace stronghold {

// Threads started meanwhile inherit the mask: signals are for the threads that the program started itself.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &callers_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &callers_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t callers_;
};

}  // namespace stronghold
