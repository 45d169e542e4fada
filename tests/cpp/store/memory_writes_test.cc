#include "store/memory_writes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace castor::testing {
namespace {

/// A writer's sign: it counts its writes, or may write unseen as long as it is there.
struct Writer {
  bool counted = true;
  bool gone = false;
  int writes = 0;
};

class SignOfWriter final : public WriteSign {
 public:
  explicit SignOfWriter(std::shared_ptr<const Writer> writer)
      : writer_(std::move(writer)), at_mark_(writer_->writes) {}

  [[nodiscard]] bool changed() const noexcept override {
    return !writer_->counted || writer_->writes != at_mark_;
  }
  [[nodiscard]] bool gone() const noexcept override { return writer_->gone; }
  void mark() noexcept override { at_mark_ = writer_->writes; }

 private:
  const std::shared_ptr<const Writer> writer_;
  int at_mark_;
};

const void* address(const int& piece) { return &piece; }

TEST(MemoryWritesTest, MemoryIsWatchedUntilItIsReplacedAndWhileTheRecordLives) {
  const std::array<int, 2> pieces{};
  const void* const first = address(pieces[0]);
  const void* const second = address(pieces[1]);
  {
    MemoryWrites writes(std::array{first});
    EXPECT_TRUE(MemoryWrites::watched(first));
    writes.replace(first, second);
    EXPECT_FALSE(MemoryWrites::watched(first));
    EXPECT_TRUE(MemoryWrites::watched(second));
    MemoryWrites::note_at(first);
    EXPECT_FALSE(writes.since_snapshot());
    MemoryWrites::note_at(second);
    EXPECT_TRUE(writes.since_snapshot());
  }
  EXPECT_FALSE(MemoryWrites::watched(second));
  MemoryWrites::follow_at(second, []() -> std::unique_ptr<WriteSign> {
    ADD_FAILURE() << "nobody watches it";
    return nullptr;
  });
}

// Signs come and go, write and are snapshotted in any order, of three pieces of memory of which one
// is replaced now and then.
TEST(MemoryWritesTest, SeededWritesAreThoseOfALog) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::minstd_rand random(seed + 1);
    const auto below = [&](std::size_t end) { return random() % end; };
    const std::array<int, 64> pieces{};
    std::size_t next_piece = 3;
    std::array<const void*, 3> memory{address(pieces[0]), address(pieces[1]), address(pieces[2])};
    MemoryWrites writes(memory);

    struct Followed {
      std::shared_ptr<Writer> writer;
      const void* of = nullptr;
      bool wrote = false;  // since the snapshot
    };
    std::vector<Followed> followed;
    bool noted = false;   // since the snapshot
    bool before = false;  // before the snapshot, after take_written()
    const auto since = [&] {
      return noted || std::ranges::any_of(followed, [](const Followed& one) { return one.wrote; });
    };
    const auto snapshot = [&] {
      before = before || since();
      noted = false;
      std::erase_if(followed, [](const Followed& one) { return one.writer->gone; });
      for (Followed& one : followed) {
        one.wrote = !one.writer->counted;
      }
    };

    for (int step = 0; step < 120; ++step) {
      const std::size_t piece = below(memory.size());
      switch (below(8)) {
        case 0:
        case 1: {
          const auto writer = std::make_shared<Writer>(Writer{.counted = below(4) > 0});
          const bool of_one = below(3) == 0;
          if (of_one) {
            writes.follow(std::make_unique<SignOfWriter>(writer), memory[piece]);
          } else {
            MemoryWrites::follow_at(memory[piece],
                                    [&] { return std::make_unique<SignOfWriter>(writer); });
          }
          followed.push_back({writer, of_one ? memory[piece] : nullptr, !writer->counted});
          break;
        }
        case 2:
        case 3:
          if (!followed.empty()) {
            Followed& one = followed[below(followed.size())];
            if (!one.writer->gone) {
              ++one.writer->writes;
              one.wrote = true;
            }
          }
          break;
        case 4:
          if (!followed.empty()) {
            followed[below(followed.size())].writer->gone = true;
          }
          break;
        case 5:
          if (below(2) == 0) {
            writes.note();
            noted = true;
          } else if (next_piece < pieces.size()) {
            const void* const other = address(pieces[next_piece++]);
            writes.replace(memory[piece], other);
            std::erase_if(followed, [&](const Followed& one) {
              const bool ended = one.of == memory[piece];
              noted = noted || (ended && one.wrote);
              return ended;
            });
            memory[piece] = other;
          }
          break;
        case 6:
          writes.snapshot();
          snapshot();
          break;
        default:
          snapshot();
          ASSERT_EQ(writes.take_written(), std::exchange(before, false)) << seed << ' ' << step;
      }
      ASSERT_EQ(writes.since_snapshot(), since()) << "seed " << seed << ", step " << step;
    }
  }
}

TEST(MemoryWritesTest, ThreadsNoteAndFollowInRecordsOfTheirOwn) {
  const std::array<int, 4> pieces{};
  std::vector<std::jthread> threads;
  for (const int& piece : pieces) {
    threads.emplace_back([&piece] {
      for (int i = 0; i < 2000; ++i) {
        MemoryWrites writes(std::array{address(piece)});
        MemoryWrites::note_at(address(piece));
        MemoryWrites::follow_at(address(piece), [] {
          return std::make_unique<SignOfWriter>(std::make_shared<Writer>());
        });
        EXPECT_TRUE(writes.take_written());
        EXPECT_FALSE(writes.take_written());
      }
    });
  }
}

}  // namespace
}  // namespace castor::testing
