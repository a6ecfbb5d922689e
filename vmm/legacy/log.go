package legacy

import (
	"fmt"
	"io"
	"os"
	"sync"
)

const (
	// DefaultLogBytes bounds a console log unless told otherwise.
	DefaultLogBytes = 256 << 10
	// minLogBytes keeps trimming rare.
	minLogBytes = 4 << 10
	// tailBytes is how much of the newest output is kept in memory.
	tailBytes = 4 << 10
	// batchBytes is the most output that waits for a line break before it is written.
	batchBytes = 512
)

// Log is a file that keeps the newest bytes written to it, and an in-memory tail. A log without a file keeps the tail only.
// Output reaches the file at line breaks, so that a character written is not a system call. Safe for concurrent use.
type Log struct {
	path string
	max  int64

	mu    sync.Mutex
	file  *os.File // nil: none
	size  int64
	batch []byte
	tail  []byte // up to 2*tailBytes; its last tailBytes count
	err   error  // the first write error; output is dropped after it
}

// OpenLog opens or creates the file and appends to it. limit is its greatest size in bytes, 0 for DefaultLogBytes. An empty
// path makes a log without a file.
func OpenLog(path string, limit uint64) (*Log, error) {
	if limit == 0 {
		limit = DefaultLogBytes
	}
	l := &Log{path: path, max: int64(min(max(limit, minLogBytes), 1<<40))}
	if path == "" {
		return l, nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open console log: %w", err)
	}
	info, err := f.Stat()
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("open console log: %w", err)
	}
	l.file, l.size = f, info.Size()
	return l, nil
}

// Write takes console output. It never fails: a guest is not stopped because its log cannot be kept; Err tells.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tail = append(l.tail, p...)
	if len(l.tail) > 2*tailBytes {
		l.tail = append(l.tail[:0], l.tail[len(l.tail)-tailBytes:]...)
	}
	if l.file == nil || l.err != nil || len(p) == 0 {
		return len(p), nil
	}
	l.batch = append(l.batch, p[max(0, len(p)-minLogBytes/2):]...)
	if len(l.batch) >= batchBytes || l.batch[len(l.batch)-1] == '\n' {
		l.flushLocked()
	}
	return len(p), nil
}

// Flush writes what waits for a line break.
func (l *Log) Flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.flushLocked()
}

// Tail returns the newest n bytes at most, and never more than 4 KiB.
func (l *Log) Tail(n int) []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	n = min(n, len(l.tail), tailBytes)
	return append([]byte(nil), l.tail[len(l.tail)-n:]...)
}

// Err returns the first error of the file, nil while it is well.
func (l *Log) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// Close flushes and closes the file.
func (l *Log) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.flushLocked()
	if l.file == nil {
		return l.err
	}
	err := l.file.Close()
	l.file = nil
	if l.err != nil {
		return l.err
	}
	return err
}

func (l *Log) flushLocked() {
	if l.file == nil || l.err != nil || len(l.batch) == 0 {
		return
	}
	if l.size+int64(len(l.batch)) > l.max {
		l.err = l.trimLocked()
	}
	if l.err == nil {
		var n int
		n, l.err = l.file.Write(l.batch)
		l.size += int64(n)
	}
	l.batch = l.batch[:0]
}

// trimLocked replaces the file by one with its newest half, by rename, so that a reader sees one or the other.
func (l *Log) trimLocked() error {
	keep := min(l.max/2, l.size)
	old := make([]byte, keep)
	if _, err := l.file.ReadAt(old, l.size-keep); err != nil && err != io.EOF {
		return fmt.Errorf("trim console log: %w", err)
	}
	name := l.path + ".new"
	f, err := os.OpenFile(name, os.O_CREATE|os.O_TRUNC|os.O_APPEND|os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("trim console log: %w", err)
	}
	if _, err = f.Write(old); err == nil {
		err = os.Rename(name, l.path)
	}
	if err != nil {
		_ = f.Close()
		_ = os.Remove(name)
		return fmt.Errorf("trim console log: %w", err)
	}
	_ = l.file.Close()
	l.file, l.size = f, keep
	return nil
}
