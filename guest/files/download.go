package files

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"mime"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"torpor/guest/env"
)

// download answers the content of one regular file.
func (h *Handler) download(w http.ResponseWriter, r *http.Request, u env.User, q url.Values) error {
	path, err := h.store.Resolve(u, q.Get("path"))
	if err != nil {
		return err
	}
	f, info, err := openRegular(path)
	if err != nil {
		return err
	}
	defer f.Close()

	plain := r.Header.Get("Range") != "" || conditional(r.Header)
	encoding, ok := negotiate(r.Header.Values("Accept-Encoding"), plain)
	if !ok {
		return &Error{http.StatusNotAcceptable, "no acceptable encoding: identity and gzip are served"}
	}
	head := w.Header()
	head.Set("Content-Disposition", mime.FormatMediaType("inline", map[string]string{"filename": info.Name()}))
	head.Set("Vary", "Accept-Encoding")
	switch {
	case encoding == "gzip":
		return sendGzip(w, r, f, info)
	case info.Size() == 0:
		return sendUnsized(w, r, f, info)
	}
	http.ServeContent(w, r, info.Name(), info.ModTime(), f)
	return nil
}

// openRegular opens a file for reading. What is no regular file is refused: a pipe would hang, a device never end.
func openRegular(path string) (*os.File, fs.FileInfo, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil, &Error{http.StatusNotFound, fmt.Sprintf("path '%s' does not exist", path)}
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.ELOOP), errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.ENXIO):
		return nil, nil, &Error{http.StatusBadRequest, fmt.Sprintf("path '%s' cannot be read: %v", path, err)}
	case err != nil:
		return nil, nil, fmt.Errorf("opening '%s': %w", path, err)
	}
	info, err := f.Stat()
	switch {
	case err != nil:
		err = fmt.Errorf("reading '%s': %w", path, err)
	case info.IsDir():
		err = &Error{http.StatusBadRequest, fmt.Sprintf("path '%s' is a directory", path)}
	case !info.Mode().IsRegular():
		err = &Error{http.StatusBadRequest, fmt.Sprintf("path '%s' is not a regular file", path)}
	}
	if err != nil {
		_ = f.Close() // only read
		return nil, nil, err
	}
	return f, info, nil
}

func conditional(h http.Header) bool {
	for _, name := range []string{"If-Match", "If-None-Match", "If-Modified-Since", "If-Unmodified-Since", "If-Range"} {
		if h.Get(name) != "" {
			return true
		}
	}
	return false
}

// sendUnsized answers a file that says it is empty: it is, or it is one of /proc, which have no size but content.
func sendUnsized(w http.ResponseWriter, r *http.Request, f *os.File, info fs.FileInfo) error {
	first := make([]byte, 32<<10)
	n, err := io.ReadFull(f, first)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		http.ServeContent(w, r, info.Name(), info.ModTime(), bytes.NewReader(first[:n]))
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading '%s': %w", info.Name(), err)
	}
	w.Header().Set("Content-Type", contentType(info.Name(), first))
	return stream(w, r, io.MultiReader(bytes.NewReader(first), f))
}

func sendGzip(w http.ResponseWriter, r *http.Request, f *os.File, info fs.FileInfo) error {
	first := make([]byte, 512)
	n, err := io.ReadFull(f, first)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("reading '%s': %w", info.Name(), err)
	}
	head := w.Header()
	head.Set("Content-Type", contentType(info.Name(), first[:n]))
	head.Set("Content-Encoding", "gzip")
	head.Set("Last-Modified", info.ModTime().UTC().Format(http.TimeFormat))
	if r.Method == http.MethodHead {
		return nil
	}
	zip := gzip.NewWriter(w)
	if err := stream(zip, r, io.MultiReader(bytes.NewReader(first[:n]), f)); err != nil {
		return err
	}
	if err := zip.Close(); err != nil {
		panic(http.ErrAbortHandler) // the client has gone
	}
	return nil
}

// stream copies a body of unknown length. Once it has begun, a failure can only be told by breaking the connection.
func stream(w io.Writer, r *http.Request, body io.Reader) error {
	if r.Method == http.MethodHead {
		return nil
	}
	if _, err := io.Copy(w, body); err != nil {
		panic(http.ErrAbortHandler)
	}
	return nil
}

func contentType(name string, first []byte) string {
	if t := mime.TypeByExtension(filepath.Ext(name)); t != "" {
		return t
	}
	return http.DetectContentType(first)
}

// negotiate chooses gzip or identity from Accept-Encoding headers (RFC 9110, 12.5.3); plain excludes gzip. It answers
// false if the client takes neither.
func negotiate(headers []string, plain bool) (string, bool) {
	weights := map[string]float64{}
	for _, item := range strings.Split(strings.Join(headers, ","), ",") {
		name, params, _ := strings.Cut(item, ";")
		weight := 1.0
		if q, ok := strings.CutPrefix(strings.ReplaceAll(strings.ToLower(params), " ", ""), "q="); ok {
			if v, err := strconv.ParseFloat(q, 64); err == nil {
				weight = v
			}
		}
		if name = strings.ToLower(strings.TrimSpace(name)); name != "" {
			weights[name] = weight
		}
	}
	any, hasAny := weights["*"]
	weigh := func(coding string, unnamed float64) float64 {
		if w, ok := weights[coding]; ok {
			return w
		}
		if hasAny {
			return any
		}
		return unnamed
	}
	zip, identity := weigh("gzip", 0), weigh("identity", 0.0001)
	switch {
	case !plain && zip > 0 && zip >= identity:
		return "gzip", true
	case identity > 0:
		return "identity", true
	}
	return "", false
}
