/* What both libraries have: types, the directory that a library lies in, and who is on which GPU. */
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long u64;
typedef unsigned long size_t;
typedef struct { const char *file; void *base; const char *symbol; void *address; } Place;
/* One of the file `contexts`: a process, and how much it has of a GPU. */
typedef struct { int gpu, pid; u64 bytes; } Slot;
enum { SLOTS = 256 };

extern int snprintf(char *, size_t, const char *, ...), dladdr(const void *, Place *);
extern char *strrchr(const char *, int);

static char directory[4096];

static void locate(void) {
    Place place;
    dladdr((void *)locate, &place);
    snprintf(directory, sizeof directory, "%s", place.file);
    char *end = strrchr(directory, '/');
    if (end) *end = 0;
}
