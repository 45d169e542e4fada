#include "io/checksum.h"

#include <gtest/gtest.h>

#include <string_view>

#include "core/error.h"
#include "io/test_support.h"

namespace castor {
namespace {

using test::SerialExecutor;

std::uint64_t of(std::string_view text) {
  return checksum(std::as_bytes(std::span(text.data(), text.size())));
}

TEST(ChecksumTest, IsXxh3OfPythonsXxhash) {
  EXPECT_EQ(of(""), 0x2d06800538d394c2U);        // xxhash.xxh3_64_hexdigest(b"")
  EXPECT_EQ(of("castor"), 0xebccf209a68d63f3U);  // xxhash.xxh3_64_hexdigest(b"castor")
}

TEST(ChecksumTest, EveryFlippedBitIsFoundAtItsPlace) {
  SerialExecutor executor;
  auto data = test::noise(2 * kChecksumBlockBytes + 4096, 1);
  const auto odd = data.span().first(2 * kChecksumBlockBytes + 777);
  const auto sums = block_checksums(executor, odd);
  ASSERT_EQ(sums.size(), 3U);
  EXPECT_FALSE(find_mismatch(executor, odd, sums));
  for (const std::size_t place : {std::size_t{0}, kChecksumBlockBytes - 1, kChecksumBlockBytes,
                                  2 * kChecksumBlockBytes, odd.size() - 1}) {
    odd[place] ^= std::byte{0x40};
    const auto mismatch = find_mismatch(executor, odd, sums);
    ASSERT_TRUE(mismatch);
    EXPECT_EQ(mismatch->offset, place / kChecksumBlockBytes * kChecksumBlockBytes);
    EXPECT_EQ(mismatch->bytes, std::min(kChecksumBlockBytes, odd.size() - mismatch->offset));
    EXPECT_EQ(mismatch->expected, sums[place / kChecksumBlockBytes]);
    EXPECT_NE(mismatch->found, mismatch->expected);
    odd[place] ^= std::byte{0x40};
  }
  EXPECT_FALSE(find_mismatch(executor, odd, sums));
}

TEST(ChecksumTest, SumsOfAnotherSizeAreRefused) {
  SerialExecutor executor;
  auto data = test::noise(4096, 1);
  EXPECT_THROW((void)find_mismatch(executor, data.span(), {}), InvalidArgument);
  EXPECT_TRUE(block_checksums(executor, {}).empty());
}

TEST(StreamChecksumTest, PiecesGiveTheChecksumOfAll) {
  StreamChecksum none;
  EXPECT_EQ(none.hex(), "99aa06d3014798d86001c324468d497f");
  std::vector<std::byte> data(10000);
  for (std::size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<std::byte>(i * 31 % 251);
  }
  StreamChecksum whole;
  whole.update(data);
  for (const std::size_t step : {1, 7, 1024, 9999}) {
    StreamChecksum pieces;
    for (std::size_t at = 0; at < data.size(); at += step) {
      pieces.update(std::span(data).subspan(at, std::min(step, data.size() - at)));
    }
    EXPECT_EQ(pieces.hex(), whole.hex());
  }
}

}  // namespace
}  // namespace castor
